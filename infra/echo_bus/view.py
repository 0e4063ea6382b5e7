"""A compacted topic as a dictionary that follows the log.

A thread of the view's own reads; any thread may ask. `wait_for` blocks its caller until the reading thread sees what is wanted, or the
deadline passes. Callbacks run on the reading thread, in log order, without the view's lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded, TransportError
from echo_bus.message import Message
from echo_bus.metrics import BusMetrics
from echo_bus.reader import LogReader
from echo_schemas.records import Record

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
_READ_S = 0.1
_WAIT_STEP_S = 0.5


class CompactedView(Generic[R]):
    """Key → newest record. Reads committed records only; a tombstone removes its key."""

    def __init__(self, reader: LogReader, *, topic: str, metrics: BusMetrics) -> None:
        """`reader` reads the one topic from the beginning and belongs to the view from now on."""
        self._reader = reader
        self._updates = metrics.view_updates.labels(topic)
        self._size = metrics.view_entries.labels(topic)
        self._topic = topic
        self._changed = threading.Condition()
        self._entries: dict[str, R] = {}
        self._ready = False
        self._closed = False
        self._failure: TransportError | None = None
        self._callbacks: list[Callable[[str, R | None], None]] = []
        self._thread = threading.Thread(target=self._follow, name=f"view {topic}", daemon=True)

    def start(self, deadline: Deadline) -> CompactedView[R]:
        """Begin to follow, and wait until everything that is in the log now has been read."""
        self._thread.start()
        self._wait(lambda: self._ready, deadline, f"the view of {self._topic} to be read to its end")
        return self

    def get(self, key: str) -> R | None:
        """The newest record of `key`, as far as this process knows."""
        with self._changed:
            self._raise_failure()
            return self._entries.get(key)

    def items(self) -> dict[str, R]:
        """A copy of everything."""
        with self._changed:
            self._raise_failure()
            return dict(self._entries)

    def wait_for(self, key: str, predicate: Callable[[R], bool], deadline: Deadline) -> R:
        """The record of `key` once it satisfies `predicate`. Raises DeadlineExceeded, or the error that ended the view."""

        def satisfied() -> bool:
            record = self._entries.get(key)
            return record is not None and predicate(record)

        with self._changed:
            self._wait(satisfied, deadline, f"{key} of {self._topic}")
            return self._entries[key]

    def on_change(self, callback: Callable[[str, R | None], None]) -> None:
        """Call `callback(key, record or None for gone)` at every change from now on."""
        with self._changed:
            self._callbacks.append(callback)

    def close(self) -> None:
        """Stop following. Idempotent."""
        self._closed = True
        if self._thread.is_alive():
            self._thread.join()
        self._reader.close()

    def _wait(self, condition: Callable[[], bool], deadline: Deadline, what: str) -> None:
        with self._changed:
            while True:
                self._raise_failure()
                if condition():
                    return
                if deadline.expired():
                    raise DeadlineExceeded(f"Waited in vain for {what}.")
                # In steps, so that a deadline on a clock that a test moves by hand is noticed too.
                self._changed.wait(min(deadline.remaining_s(), _WAIT_STEP_S))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _follow(self) -> None:
        while not self._closed:
            try:
                messages = self._reader.read(_READ_S)
            except TransportError as exc:
                with self._changed:
                    self._failure = exc
                    self._changed.notify_all()
                logger.error("The view of %s ends: %s", self._topic, exc)  # noqa: TRY400  the traceback goes with the error to whoever asks the view
                return
            changes = [(message.key, message.record) for message in messages if isinstance(message, Message) and message.key is not None]
            with self._changed:
                for key, record in changes:
                    if record is None:
                        self._entries.pop(key, None)
                    else:
                        self._entries[key] = cast("R", record)
                self._ready = self._ready or self._reader.caught_up()
                callbacks = tuple(self._callbacks)
                self._changed.notify_all()
            self._updates.inc(len(changes))
            self._size.set(len(self._entries))
            for key, record in changes:
                for callback in callbacks:
                    callback(key, cast("R | None", record))
