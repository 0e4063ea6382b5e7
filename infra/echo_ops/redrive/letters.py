"""What lies among the dead letters of a topic: each message as it was, and what its headers say became of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo_bus.client.cluster import RawMessage
from echo_bus.dead_letters import (
    HEADERS_LEFT_OUT,
    KEY_TRUNCATED_FROM,
    MESSAGE,
    ORIGINAL_OFFSET,
    ORIGINAL_PARTITION,
    READER,
    REASON,
    RETRIES,
    TRUNCATED_FROM,
    is_ours,
)
from echo_bus.message import raw_headers
from echo_schemas.headers import RUN, SOURCE, number_of
from echo_schemas.records import Coordinates
from echo_schemas.topics import Topic

if TYPE_CHECKING:
    from echo_replay.raw_log import RawLog

UNKNOWN = "unknown"
"""Reason, writer or reader of a letter whose headers do not say it."""
REDRIVEN = "echo-redriven-"
"""What the headers of a message that was brought back begin with: `from`, `by`, `ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that could not be used. `offset`: among the dead letters, which are one partition; `headers`: the original's own;
    `origin`: where it lay in its topic; `num_redriven`: how often it was brought back before; `is_cut`: the copy lacks bytes."""

    topic: Topic
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    reason: str
    message: str
    reader: str
    writer: str
    run_id: str | None
    origin: Coordinates | None
    num_redriven: int
    is_cut: bool


def letter_of(raw: RawMessage, topic: Topic) -> Letter:
    """The letter that `raw`, a message among the dead letters of `topic`, is. Headers that are missing or wrong make nothing fail."""
    pairs = raw_headers(raw)
    said = {name: value for name, value in pairs if value is not None}  # type: ignore[redundant-expr]  # Kafka allows null values
    partition, offset = number_of(said.get(ORIGINAL_PARTITION)), number_of(said.get(ORIGINAL_OFFSET))
    return Letter(
        topic=topic,
        offset=raw.offset() or 0,
        time_ms=raw.timestamp()[1],
        key=raw.key(),
        value=raw.value(),
        headers=tuple((name, value) for name, value in pairs if not is_ours(name) and not name.startswith(REDRIVEN)),
        reason=_text(said, REASON),
        message=_text(said, MESSAGE),
        reader=_text(said, READER),
        writer=_text(said, SOURCE),
        run_id=said[RUN].decode(errors="replace") if RUN in said else None,
        origin=None if partition is None or offset is None else Coordinates(partition=partition, offset=offset),
        num_redriven=number_of(said.get(RETRIES)) or 0,
        is_cut=not said.keys().isdisjoint({TRUNCATED_FROM, KEY_TRUNCATED_FROM, HEADERS_LEFT_OUT}),
    )


def letters_of(log: RawLog, topic: Topic, *, first: int = 0, end: int | None = None) -> Iterator[Letter]:
    """The letters from offset `first` up to `end` (None: all there are now), in order."""
    low, high = log.lows[0], log.ends[0]
    begin, until = max(low, first), high if end is None else min(high, end)
    for messages in log.within({0: (begin, until)}) if begin < until else ():
        for raw in messages:
            yield letter_of(raw, topic)


def _text(said: dict[str, bytes], name: str) -> str:
    return said[name].decode(errors="replace") if said.get(name) else UNKNOWN
