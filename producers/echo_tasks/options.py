"""Checks of a task's options. Each raises UserError with the option's name, the value it was given, and those it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from echo_schemas.errors import UserError

_E = TypeVar("_E", bound=StrEnum)


def whole_number(option: str, value: Any, *, least: int, most: int | None = None) -> int:
    """`value`, if it is a whole number from `least` to `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise UserError(f"[task.options] {option} = {value!r} is no whole number {bounds}.")
    return value


def one_of(option: str, value: Any, kind: type[_E]) -> _E:
    """The member of `kind` that `value` names."""
    return kind(name_of(option, value, list(kind)))


def name_of(option: str, value: Any, known: Iterable[str]) -> str:
    """`value`, if it is one of the names `known`."""
    names = list(known)
    if value not in names:
        raise UserError(f"[task.options] {option} = {value!r} is none of its values.", hint=nearest(str(value), names))
    return str(value)


def names_of(option: str, value: Any, known: Iterable[str]) -> tuple[str, ...]:
    """`value` as several of the names `known`; one may stand alone."""
    given: Any = [value] if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"[task.options] {option} = {value!r} is no list of names.", hint=f"It takes: {', '.join(known)}.")
    return tuple(name_of(option, each, known) for each in given)


def amount(option: str, value: Any) -> float:
    """`value`, if it is a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UserError(f"[task.options] {option} = {value!r} is no number from 0 on.")
    return float(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the name in `known` that is like `name`, else all of them."""
    names = [str(one) for one in known]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(names)}."
