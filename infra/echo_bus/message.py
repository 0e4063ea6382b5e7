"""A message as handlers see it, and the three things a handler may say about it.

Accepted            done, or in the handler's hands: the offset becomes committable, at once or when `completion` is set, which may also
                    say that it has failed: as Invalid
Invalid(reason)     can never be accepted: it goes to the dead letters, and the offset moves on
Busy                not now: the partition is paused and the message is offered again
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from echo_bus.client.cluster import RawMessage
from echo_schemas.errors import InvalidReason
from echo_schemas.records import Coordinates, Record
from echo_schemas.topics import Topic


def raw_headers(raw: RawMessage) -> list[tuple[str, bytes]]:
    """A message's headers as the client gives them; none where it cannot, because a name is no UTF-8. The one way to ask for them.

    confluent-kafka (2.16) makes a pair without a name then, which ends the process as soon as anybody looks at it, and raises SystemError;
    not even that when garbage is collected meanwhile. So names and values are counted without looking at them, and what is not whole is
    taken away.
    """
    try:
        pairs = raw.headers() or ()
        is_whole = len(gc.get_referents(*pairs)) == 2 * len(pairs)
    except Exception:  # see above
        is_whole = False
    if is_whole:
        return list(pairs)
    # The message is judged by its body.
    forget = getattr(raw, "set_headers", None)
    if forget is not None:
        forget([])
    return []


class LazyHeaders(Mapping[str, bytes]):
    """A message's headers, turned into a dictionary when somebody looks: on the hot path nobody does. The last of equal names counts."""

    __slots__ = ("_parsed", "_raw")

    def __init__(self, raw: RawMessage) -> None:
        self._raw = raw
        self._parsed: dict[str, bytes] | None = None

    def __getitem__(self, name: str) -> bytes:
        return self._dictionary()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dictionary())

    def __len__(self) -> int:
        return len(self._dictionary())

    def __repr__(self) -> str:
        return f"LazyHeaders({self._dictionary()!r})"

    def _dictionary(self) -> dict[str, bytes]:
        if self._parsed is None:
            # Kafka allows null header values, which the client's type stubs do not know.
            self._parsed = {name: value for name, value in raw_headers(self._raw) if value is not None}  # type: ignore[redundant-expr]
        return self._parsed


@dataclass(slots=True)
class Message:
    """One decoded message. Treat as immutable; not frozen because one is built per record on the hot path.

    `record` is None only for a tombstone on a compacted topic.
    """

    topic: Topic
    partition: int
    offset: int
    key: str | None
    record: Record | None
    headers: Mapping[str, bytes]
    timestamp_ms: int
    num_bytes: int

    @property
    def coordinates(self) -> Coordinates:
        """(partition, offset)."""
        return Coordinates(partition=self.partition, offset=self.offset)


@dataclass(frozen=True, slots=True)
class Invalid:
    """The handler can never take the message."""

    reason: InvalidReason
    detail: str = ""


class Completion:
    """Says later that an accepted message is done. `done` may be called from any thread, once or more; the first call counts."""

    __slots__ = ("_callback", "_done", "_lock", "_refused")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._refused: Invalid | None = None
        self._callback: Callable[[Invalid | None], None] | None = None

    def done(self, refused: Invalid | None = None) -> None:
        """The message's work is durable; its offset may be committed. `refused`: the work has failed for good, and the message goes to the
        dead letters first. Blocks only for those, while the publisher's buffer is full.
        """
        with self._lock:
            if self._done:
                return
            self._done, self._refused = True, refused
            callback = self._callback
        if callback is not None:
            callback(refused)

    def on_done(self, callback: Callable[[Invalid | None], None]) -> None:
        """Called by the consumer loop, once: `callback` runs at `done`, or now if that was before, with what `done` was told."""
        with self._lock:
            if not self._done:
                self._callback = callback
                return
        callback(self._refused)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The handler took the message. With a completion, its offset waits for `completion.done()`."""

    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """The handler cannot take the message now."""


Outcome = Accepted | Invalid | Busy
ACCEPTED = Accepted()
BUSY = Busy()


class Handler(Protocol):
    """What a consumer loop calls, from its one worker thread, in offset order within a partition."""

    def __call__(self, message: Message) -> Outcome:
        """Say what became of the message. May block. An exception stops the loop and is raised from `run`."""
