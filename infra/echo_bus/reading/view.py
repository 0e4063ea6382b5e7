"""A compacted topic as a dictionary that follows the log.

Threads: the view's own thread reads; callers read the dictionary or wait on it. `open` blocks until the dictionary holds all that the topic
held when it was called. If reading fails, every later call raises the cause.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_bus.message import Message
from echo_bus.reading.reader import LogReader
from echo_bus.wire import Wire
from echo_schemas.errors import UserError
from echo_schemas.records import Record
from echo_schemas.topics import Topic

logger = logging.getLogger(__name__)

V = TypeVar("V", bound=Record)
OnChange = Callable[[str, V | None], None]

_READ_S = 0.2


class CompactedView(Generic[V]):
    """The newest record of every key of one topic. Thread-safe; `close` it, which closes the reader too."""

    def __init__(
        self,
        reader: LogReader,
        wire: Wire,
        topic: Topic,
        record: type[V],
        *,
        only: str | None = None,
        is_outdated: Callable[[V, V], bool] = lambda known, new: False,
    ) -> None:
        """`reader` reads `topic` alone and ignores other runs' records; the view also ignores other runs' tombstones.

        `only`: keep this one key, on a topic that grows with the run. If `is_outdated(known, new)`, the key keeps `known`, although `new`
        was written later.
        """
        if not topic.compacted:
            raise UserError(f"{topic.name!r} is not compacted, so a view of it would not be whole.", hint="Read it with LogReader.")
        self._reader = reader
        self._record = record
        self._is_outdated = is_outdated
        self._own_keys = None if wire.run_id is None else (wire.run_id, f"{wire.run_id}/")
        self._only = only
        self._updates = wire.metrics.view_updates.labels(topic.name)
        self._size = wire.metrics.view_entries.labels(topic.name)
        self._changed = threading.Condition()
        self._entries: dict[str, V] = {}
        self._listeners: list[OnChange[V]] = []
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"view of {topic.name}", daemon=True)

    def open(self, deadline: Deadline) -> None:
        """Read to the present end, then follow. Raises DeadlineExceeded, or as `LogReader.read`."""
        self.load(deadline)
        self._reader.stay()
        self._thread.start()

    def load(self, deadline: Deadline) -> None:
        """Read to the present end only. Raises as `open`."""
        self._reader.start()
        for messages in self._reader.read_to_end(deadline):
            self._apply(messages)

    def get(self, key: str) -> V | None:
        """The newest record of `key`; None if there is none or it was deleted."""
        with self._changed:
            self._raise_error()
            return self._entries.get(key)

    def items(self) -> dict[str, V]:
        """A copy of everything."""
        with self._changed:
            self._raise_error()
            return dict(self._entries)

    def wait_for(self, key: str, predicate: Callable[[V], bool], deadline: Deadline, *, what: str = "") -> V:
        """Wait until the record of `key` satisfies `predicate`, and return it. `what` names the state in the error.

        Raises DeadlineExceeded, or the cause if the view has failed.
        """
        found: V | None = None

        def is_there() -> bool:
            nonlocal found
            self._raise_error()
            found = self._entries.get(key)
            return found is not None and predicate(found)

        with self._changed:
            if not self._changed.wait_for(is_there, deadline.remaining_s()) or found is None:
                raise DeadlineExceeded(f"{what or f'The awaited state of {key!r}'} did not come in time; it is {found!r}.")
            return found

    def on_change(self, listener: OnChange[V]) -> None:
        """Call `listener(key, record or None)` for each change from now on, on the view's thread; it must be short and must not block.

        An exception from it fails the view.
        """
        with self._changed:
            self._listeners.append(listener)

    def close(self) -> None:
        """Stop following. Idempotent. Waiters are not woken: they have deadlines."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._reader.close()

    def _follow(self) -> None:
        try:
            while not self._closed.is_set():
                messages = self._reader.read(timeout_s=_READ_S)
                if messages:
                    self._apply(messages)
        except BaseException as exc:  # the edge of the thread: every later call raises it
            logger.exception("A view has failed")
            with self._changed:
                self._error = exc
                self._changed.notify_all()

    def _apply(self, messages: list[Message]) -> None:
        """Apply a batch, then wake the waiting threads and call the listeners."""
        changes: list[tuple[str, V | None]] = []
        with self._changed:
            for message in messages:
                key, record = message.key, message.record
                if key is None or not (record is None or isinstance(record, self._record)):
                    continue
                if self._only is not None and key != self._only:
                    continue
                if record is not None:
                    known = self._entries.get(key)
                    if known is not None and self._is_outdated(known, record):
                        logger.warning("A record of %s under %r comes after a newer one, and is ignored", message.topic.name, key)
                        continue
                    self._entries[key] = record
                elif self._is_ours(key):
                    self._entries.pop(key, None)
                else:
                    continue
                changes.append((key, record))
            listeners: list[Any] = list(self._listeners)
            self._updates.inc(len(changes))
            self._size.set(len(self._entries))
            self._changed.notify_all()
        for listener in listeners:
            for key, record in changes:
                listener(key, record)

    def _is_ours(self, key: str) -> bool:
        return self._own_keys is None or key == self._own_keys[0] or key.startswith(self._own_keys[1]) or key in self._entries

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
