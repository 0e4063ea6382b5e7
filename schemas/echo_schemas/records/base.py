"""What every record is: frozen, slotted, keyword-only, able to say why it is not acceptable.

A record's Avro schema (`avro/<name>.v<n>.avsc`) is the truth on the wire; the dataclass mirrors its newest version field by field.
`validate` states what Avro cannot: ranges, lengths that must agree, finite numbers. The codec calls it in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from echo_schemas.errors import InvalidReason, InvalidRecord

MAX_NAME_LENGTH = 256
"""Characters of an attempt's, a worker's, a reward's name: ten times those of our own."""


class Record:
    """Base of all records that travel on topics.

    `SCHEMA` is the schema's short name: `avro/<SCHEMA>.v<n>.avsc`, Avro full name `echoswarm.<ClassName>`.
    """

    __slots__ = ()
    SCHEMA: ClassVar[str]
    run_id: str

    def validate(self) -> None:
        """Raise InvalidRecord if the record contradicts itself. Cheap: called for every message, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a record lies in its topic. The identity by which trajectories are accounted for."""

    partition: int
    offset: int


def require(condition: bool, reason: InvalidReason, message: str) -> None:
    """Raise InvalidRecord unless `condition` holds. For checks off the hot path: `message` is built either way."""
    if not condition:
        raise InvalidRecord(reason, message)


def require_name(kind: str, name: str) -> None:
    """Raise InvalidRecord for a name that is empty, or so long that it would not fit where it is repeated (keys, labels, other records)."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidRecord(InvalidReason.INCONSISTENT, f"{kind} has {len(name)} characters; a name has 1 to {MAX_NAME_LENGTH}.")


def require_not_negative(**numbers: int | float | None) -> None:
    """Raise InvalidRecord for the first of `numbers` that is below zero, or no number at all (NaN, an infinity). None passes."""
    for name, number in numbers.items():
        if number is None:
            continue
        if number < 0:
            raise InvalidRecord(InvalidReason.NEGATIVE_NUMBER, f"{name} is {number}; it must not be negative.")
        if not math.isfinite(number):
            raise InvalidRecord(InvalidReason.NOT_FINITE, f"{name} is {number}; it must be a number.")
