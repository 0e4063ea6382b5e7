"""What every engine refuses before it looks: prompts and sampling out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from echo_rollout.engines.engine import EngineError, check_prompt
from echo_schemas.records import Sampling


def check(prompt: tuple[int, ...] = (1, 2), **sampling: Any) -> None:
    check_prompt(prompt, Sampling(**{"max_new_tokens": 6, **sampling}), vocabulary=10, max_length=8)


def test_what_fits_exactly_passes() -> None:
    check()
    check((9,), temperature=0.0, top_p=0.1, top_k=3, min_p=0.5, seed=0, stop=("\n", "ab"))


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ((), "The prompt is empty"),
        ((10,), "outside the vocabulary of 10"),
        ((-1,), "outside the vocabulary"),
        ((1, 2, 3), "3 tokens and 6 new"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        check(prompt)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 0.009),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(EngineError, match=rf"sampling\.{name} is"):
        check(**{name: value})
