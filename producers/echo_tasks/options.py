"""Checks of what a task is made with: each raises UserError with the option's name, what it was given and what it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from importlib.util import find_spec
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
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"[task.options] {option} = {value!r} is none of its values.", hint=nearest(str(value), list(kind))) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: what `name` may have been meant to be, or all that there is to choose from."""
    names = [str(one) for one in known]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(names)}."


def require_library(module: str, task: str) -> None:
    """Raises UserError if `module` is not installed. It is not imported: that may take seconds."""
    if find_spec(module) is None:
        raise UserError(
            f"The task {task!r} needs {module}, which is not installed.", hint="Install the extra: pip install 'echoswarm[tasks]'."
        )
