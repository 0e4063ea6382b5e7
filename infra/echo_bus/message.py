"""A message as handlers see it, and the three outcomes that a handler may return.

Accepted            The offset becomes committable: at once, or when `completion` is done, which may also report a failure as Invalid.
Invalid(reason)     The message can never be accepted: it goes to the dead letters, and the offset moves on.
Busy                Not now: the partition is paused, and the message is offered again.
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
    """A message's headers as the client gives them; an empty list if a header's name is not UTF-8. Always read headers through this.

    For such a name confluent-kafka (2.16) makes a pair without a name and raises SystemError, or nothing if the garbage collector runs at
    that moment. Reading the pair crashes the process. So this counts names and values without reading them, and drops incomplete headers.
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
    """A message's headers, parsed at the first access: the hot path never needs them. The last of several equal names counts."""

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
        return Coordinates(partition=self.partition, offset=self.offset)


@dataclass(frozen=True, slots=True)
class Invalid:
    """The handler can never accept the message."""

    reason: InvalidReason
    detail: str = ""


class Completion:
    """Reports later that an accepted message is done. Any thread may call `done`, also several times; the first call counts."""

    __slots__ = ("_callback", "_done", "_lock", "_refused")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._refused: Invalid | None = None
        self._callback: Callable[[Invalid | None], None] | None = None

    def done(self, refused: Invalid | None = None) -> None:
        """The message's work is durable, so its offset may be committed. `refused`: the work has failed for good, so the message
        goes to the dead letters first, and the call blocks while the publisher's buffer is full.
        """
        with self._lock:
            if self._done:
                return
            self._done, self._refused = True, refused
            callback = self._callback
        if callback is not None:
            callback(refused)

    def on_done(self, callback: Callable[[Invalid | None], None]) -> None:
        """Run `callback` with the argument of `done`, at `done` or now if `done` was called before. The consumer loop calls this once."""
        with self._lock:
            if not self._done:
                self._callback = callback
                return
        callback(self._refused)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The handler accepted the message. With a completion, its offset waits for `completion.done()`."""

    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """The handler cannot accept the message now."""


Outcome = Accepted | Invalid | Busy
ACCEPTED = Accepted()
BUSY = Busy()


class Handler(Protocol):
    """Called by a consumer loop, from its one worker thread, in offset order within a partition."""

    def __call__(self, message: Message) -> Outcome:
        """The outcome of the message. May block. An exception stops the loop; `run` raises it."""
