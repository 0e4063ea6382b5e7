"""What a reward function may return: a finite number, or a `RewardResult` of finite numbers. Everything else is refused in words."""

from __future__ import annotations

import math
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
    """A value that may be written: finite, with finite parts."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


def score_of(returned: Any) -> Score:
    """What one call returned, as a score. Raises BadValue with a sentence that a person can act on."""
    if type(returned) is float and math.isfinite(returned):
        return Score(returned)
    if isinstance(returned, RewardResult):
        if len(returned.components) > _MAX_COMPONENTS:
            raise BadValue(f"A reward may have {_MAX_COMPONENTS} components; it has {len(returned.components)}.")
        components = {_name(name): _number(part, f"component {_name(name)!r}") for name, part in returned.components.items()}
        return Score(_number(returned.value, "value"), components)
    return Score(_number(returned, "value"))


def scores_of(returned: Any, num_samples: int) -> list[Score]:
    """What a batch function returned for `num_samples`, as scores in the same order. Raises BadValue."""
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
    # numpy's scalars are registered as Real except its booleans, which have nothing to say that float() does not.
    if not isinstance(given, Real):
        raise BadValue(f"The {what} must be a number; it is {_shown(given)}.")
    number = float(given)
    if not math.isfinite(number):
        raise BadValue(f"The {what} is {number}; a reward must be finite.")
    return number


def _shown(given: Any) -> str:
    kind = type(given).__name__
    return "None (is a `return` missing?)" if given is None else f"a {kind}"
