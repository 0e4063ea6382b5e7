"""What is a reward and what is not."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from echo_streams.values import BadValue, Score, score_of, scores_of
from echo_tasks.rewards import RewardResult


@pytest.mark.parametrize(
    ("returned", "value"), [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25), (np.int64(3), 3.0), (Fraction(1, 2), 0.5)]
)
def test_numbers_of_every_kind_are_rewards(returned: Any, value: float) -> None:
    score = score_of(returned)
    assert score == Score(value)
    assert type(score.value) is float


def test_a_result_keeps_its_parts() -> None:
    score = score_of(RewardResult(value=np.float64(1.5), components={"right": 1, "short": np.float64(0.5)}))
    assert score == Score(1.5, {"right": 1.0, "short": 0.5})
    assert {type(part) for part in score.components.values()} == {float}


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (math.nan, "The value is nan; a reward must be finite."),
        (math.inf, "The value is inf; a reward must be finite."),
        (np.float32("-inf"), "The value is -inf; a reward must be finite."),
        (RewardResult(value=math.nan), "The value is nan; a reward must be finite."),
        (RewardResult(value=1.0, components={"right": math.inf}), "The component 'right' is inf; a reward must be finite."),
        (RewardResult(value=1.0, components={"right": "yes"}), "The component 'right' must be a number; it is a str."),  # type: ignore[dict-item]
        (None, r"The value must be a number; it is None \(is a `return` missing\?\)."),
        ("1.0", "The value must be a number; it is a str."),
        (Decimal("0.5"), "The value must be a number; it is a Decimal."),
        (1 + 2j, "The value must be a number; it is a complex."),
        (np.zeros(1), "The value must be a number; it is a ndarray."),
    ],
)
def test_everything_else_is_refused_in_words(returned: Any, why: str) -> None:
    with pytest.raises(BadValue, match=why):
        score_of(returned)


def test_a_batch_gives_one_value_per_sample() -> None:
    assert scores_of([0.5, RewardResult(value=1.0)], 2) == [Score(0.5), Score(1.0)]
    assert scores_of(np.array([0.5, 1.0], np.float32), 2) == [Score(0.5), Score(1.0)]
    with pytest.raises(BadValue, match="2 were given, 3 came back"):
        scores_of([1.0, 2.0, 3.0], 2)
    with pytest.raises(BadValue, match="must return a list of 2 values; it returned float"):
        scores_of(1.0, 2)
    with pytest.raises(BadValue, match="nan"):
        scores_of([1.0, math.nan], 2)
