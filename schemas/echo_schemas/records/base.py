"""The base of all records: frozen, slotted, keyword-only dataclasses that validate themselves.

A record's Avro schema (`avro/<name>.v<n>.avsc`) is the truth on the wire; the dataclass mirrors its newest version field by field.
`validate` checks what Avro cannot: ranges, equal lengths, finite numbers. The codec calls it in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from echo_schemas.errors import InvalidReason, InvalidRecord

MAX_NAME_LENGTH = 256
"""Characters of the name of an attempt, a worker or a reward: ten times the length of our own names."""


class Record:
    """Base of all records that travel on topics. `SCHEMA` is the schema's short name: `avro/<SCHEMA>.v<n>.avsc`, Avro full name
    `echoswarm.<ClassName>`. `REPEATED`: first and last of neighbouring fields that a record mostly has in common with the one before it
    on its partition, so that readers need not read them again. Two or more, all immutable."""

    __slots__ = ()
    SCHEMA: ClassVar[str]
    REPEATED: ClassVar[tuple[tuple[str, str], ...]] = ()
    run_id: str

    def validate(self) -> None:
        """Raise InvalidRecord if the record contradicts itself. Cheap: called for every message, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The place of a record in its topic: the identity by which trajectories are accounted for."""

    partition: int
    offset: int


def require(condition: bool, message: str, reason: InvalidReason = InvalidReason.INCONSISTENT) -> None:
    """Raise InvalidRecord unless `condition` holds. For checks off the hot path: `message` is built in any case."""
    if not condition:
        raise InvalidRecord(reason, message)


def require_name(kind: str, name: str) -> None:
    """Raise InvalidRecord for a name that is empty, or too long for keys, labels and other records."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidRecord(InvalidReason.INCONSISTENT, f"{kind} has {len(name)} characters; a name has 1 to {MAX_NAME_LENGTH}.")


def require_not_negative(**numbers: int | float | None) -> None:
    """Raise InvalidRecord for the first of `numbers` that is negative, NaN or infinite. None passes."""
    for name, number in numbers.items():
        if number is None:
            continue
        if number < 0:
            raise InvalidRecord(InvalidReason.NEGATIVE_NUMBER, f"{name} is {number}; it must not be negative.")
        if not math.isfinite(number):
            raise InvalidRecord(InvalidReason.NOT_FINITE, f"{name} is {number}; it must be a number.")
