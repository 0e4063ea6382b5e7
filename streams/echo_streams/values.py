"""Checks what a reward function returned: a finite number, or a `RewardResult` of finite numbers; raises BadValue for anything else."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from echo_tasks.rewards import RewardResult

_MAX_COMPONENTS = 64
_MAX_NAME_LENGTH = 100


class BadValue(ValueError):
    """A reward function returned something that is no reward."""


@dataclass(frozen=True, slots=True)
class Score:
    """A finite value, with finite components."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


def score_of(returned: Any) -> Score:
    """The return value of one call as a score. Raises BadValue with a sentence for the function's author."""
    if type(returned) is float and math.isfinite(returned):
        return Score(returned)
    if isinstance(returned, RewardResult):
        if len(returned.components) > _MAX_COMPONENTS:
            raise BadValue(f"A reward may have {_MAX_COMPONENTS} components; it has {len(returned.components)}.")
        components = {_name(name): _number(part, f"component {_name(name)!r}") for name, part in returned.components.items()}
        return Score(_number(returned.value, "value"), components)
    return Score(_number(returned, "value"))


def scores_of(returned: Any, num_samples: int) -> list[Score]:
    """The return value of a batch function for `num_samples` as scores in the same order. Raises BadValue."""
    try:
        values: Sequence[Any] = list(returned)
    except TypeError:
        raise BadValue(f"A batch reward must return a list of {num_samples} values; it returned {type(returned).__name__}.") from None
    if len(values) != num_samples:
        raise BadValue(f"A batch reward must return one value per sample: {num_samples} were given, {len(values)} came back.")
    return [score_of(value) for value in values]


def _name(given: Any) -> str:
    name = str(given)
    if len(name) > _MAX_NAME_LENGTH or not name.isprintable():
        raise BadValue(f"The name of a component has at most {_MAX_NAME_LENGTH} printable characters; one is {name[:_MAX_NAME_LENGTH]!a}.")
    return name


def _number(given: Any, what: str) -> float:
    # numpy registers its scalars as Real, except booleans.
    if not isinstance(given, Real):
        kind = "None (is a `return` missing?)" if given is None else f"a {type(given).__name__}"
        raise BadValue(f"The {what} must be a number; it is {kind}.")
    number = float(given)
    if not math.isfinite(number):
        raise BadValue(f"The {what} is {number}; a reward must be finite.")
    return number


def end_fork(pid: int) -> None:
    """End this process unless it is `pid`, which called a function: that has forked and returned in both, and only one may answer and be
    called again.
    """
    if os.getpid() != pid:
        os._exit(0)
