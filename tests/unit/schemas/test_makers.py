"""Frozen dataclasses made without their constructor are the same objects."""

from __future__ import annotations

import dataclasses

import pytest

from echo_schemas.converters import maker_of
from echo_schemas.records import Coordinates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Awkward:
    """Fields with the names that such a function might use itself."""

    record: int
    cls: str
    new: float = 1.0


def test_a_made_object_equals_a_constructed_one_and_is_frozen() -> None:
    made = maker_of(Coordinates)(partition=3, offset=4)
    assert made == Coordinates(partition=3, offset=4)
    assert type(made) is Coordinates
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.offset = 5  # type: ignore[misc]  # that is what must fail


def test_a_field_may_have_any_name() -> None:
    assert maker_of(_Awkward)(record=1, cls="a", new=2.0) == _Awkward(record=1, cls="a", new=2.0)


def test_every_field_must_be_given() -> None:
    with pytest.raises(TypeError, match="new"):
        maker_of(_Awkward)(record=1, cls="a")
