"""The dead letters of a topic: each message as it was, and what its headers say of the failure."""

from __future__ import annotations

from dataclasses import dataclass

from echo_bus.client.cluster import RawMessage
from echo_bus.dead_letters import (
    HEADERS_LEFT_OUT,
    KEY_TRUNCATED_FROM,
    MESSAGE,
    READER,
    REASON,
    RETRIES,
    TRUNCATED_FROM,
    is_ours,
    original_place,
)
from echo_bus.message import raw_headers
from echo_schemas.headers import RUN, SOURCE, number_of
from echo_schemas.records import Coordinates
from echo_schemas.topics import Topic

UNKNOWN = "unknown"
"""Reason, writer or reader of a letter whose headers lack it."""
REDRIVEN = "echo-redriven-"
"""Prefix of the headers of a redriven message: `from`, `by`, `ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that its reader could not use. `offset`: in the topic of dead letters, which has one partition; `headers`: of the original;
    `origin`: its old place; `num_redriven`: how often it was redriven before; `is_cut`: the copy lacks bytes."""

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
    """`raw`, a message of the dead-letter topic of `topic`, as a letter. Missing or wrong headers raise nothing."""
    pairs = raw_headers(raw)
    said = {name: value for name, value in pairs if value is not None}  # type: ignore[redundant-expr]  # Kafka allows null values
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
        origin=original_place(said),
        num_redriven=number_of(said.get(RETRIES)) or 0,
        is_cut=not said.keys().isdisjoint({TRUNCATED_FROM, KEY_TRUNCATED_FROM, HEADERS_LEFT_OUT}),
    )


def reason_of(raw: RawMessage) -> str:
    """The reason of the letter that `raw` is, without making the letter: a list of a hundred thousand needs no more of most of them."""
    # As in a letter, the last of equal names counts.
    for name, value in reversed(raw_headers(raw)):
        if name == REASON and value is not None:
            return value.decode(errors="replace") or UNKNOWN
    return UNKNOWN


def _text(said: dict[str, bytes], name: str) -> str:
    return said[name].decode(errors="replace") if said.get(name) else UNKNOWN
