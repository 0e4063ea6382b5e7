"""Countdown: targets that can be reached, and expressions that are judged by the rules and cost nothing."""

from __future__ import annotations

import contextlib
import json
import warnings
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.errors import UserError
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.countdown import Countdown, NotAllowed, countdown, value_of
from tests.unit.tasks.samples import sample

NUMBERS = [3, 8, 25, 8]
ENTRY = {"numbers": NUMBERS, "target": 131}


def judged(completion: str, entry: dict[str, Any] = ENTRY) -> tuple[float, float]:
    """The value, and whether the rules were kept."""
    result = countdown(sample(completion, entry))
    return result.value, result.components["valid"]


def test_a_wrong_sum_by_the_rules() -> None:
    assert judged("<answer>25*(8-3)+8</answer>") == (0.0, 1.0)


@pytest.mark.parametrize(
    ("expression", "numbers", "target"),
    [
        ("25 * 5 + 6", [5, 6, 25], 131),
        ("(25*5)+6 = 131", [5, 6, 25], 131),
        ("25 × 5 + 6", [5, 6, 25], 131),
        ("8 / (3 - 8 / 3)", [8, 8, 3, 3], 24),
        ("-5 + 25", [5, 25], 20),
        ("7", [7, 3], 7),
        ("5 − 3", [5, 3], 2),
        ("6 ÷ 3", [6, 3], 2),
        ("1-\n2", [1, 2], -1),
    ],
)
def test_a_right_answer_by_the_rules(expression: str, numbers: list[int], target: int) -> None:
    entry = {"numbers": numbers, "target": target}
    assert judged(f"Let me see. <answer>{expression}</answer>", entry) == (1.0, 1.0)
    assert judged(expression, entry) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("25 * 25", "25 is not there, or not so often"),
        ("131", "131 is not there"),
        ("025", "025 is not there"),
        ("8 / (8 - 8)", "8 is not there, or not so often"),
        ("3 / (8 - 8)", "division by zero"),
        ("8 // 3", "another operation"),
        ("8 ** 8", "another operation"),
        ("3 8", "no expression"),
        ("", "not only numbers"),
        ("+", "no expression"),
        ("()", "another operation"),
        ("8()", "another operation"),
        ("3,8", "not only numbers"),
        ("8.0", "not only numbers"),
        ("8e3", "not only numbers"),
        ("8_3", "not only numbers"),
        ("٨", "not only numbers"),
        ("0x8", "not only numbers"),
        ("I cannot", "not only numbers"),
    ],
)
def test_an_answer_that_breaks_the_rules(expression: str, why: str) -> None:
    with pytest.raises(NotAllowed, match=why):
        value_of(expression, NUMBERS)
    assert judged(f"<answer>{expression}</answer>") == (0.0, 0.0)


HOSTILE = [
    "9**9**9**9",
    "8**8**3",
    "__import__('os').system('true')",
    "(lambda: 131)()",
    "[8 for _ in iter(int, 1)]",
    "8 if 1 else 3",
    "(" * 199 + "8" + ")" * 199,
    "(" * 100_000 + "8" + ")" * 100_000,
    "-" * 399 + "8",
    "8" * 400,
    "8+" * 100_000 + "8",
    "\x00",
    "8\\\n+3",
    "8\n+3\n",
    "131 # 8",
    "8 = 131",
    "=131",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_is_wrong_and_nothing_is_computed(expression: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judged(f"<answer>{expression}</answer>")[0] == 0.0


@given(st.text(alphabet="0123456789+-*/() =.^_eE\n'[],:", max_size=60))
def test_whatever_is_written_is_a_value_or_not_allowed(text: str) -> None:
    with contextlib.suppress(NotAllowed):
        assert isinstance(value_of(text, list(range(10))), Fraction)


@pytest.mark.parametrize(
    "options", [{}, {"min_numbers": 2, "max_numbers": 2, "max_value": 9, "min_target": 0, "max_target": 9}, {"max_numbers": 8}]
)
def test_every_target_can_be_reached_with_the_numbers(options: dict[str, int]) -> None:
    task = Countdown(**options)  # type: ignore[arg-type]
    for seq in range(200):
        entry = task.prompt(5, seq).entry
        assert judged(entry["answer"], dict(entry)) == (1.0, 1.0)
        assert options.get("min_numbers", 3) <= len(entry["numbers"]) <= options.get("max_numbers", 4)
        assert options.get("min_target", 10) <= entry["target"] <= options.get("max_target", 100)
        assert max(entry["numbers"]) <= options.get("max_value", 99)
        assert json.loads(json.dumps(entry)) == entry


def test_prompts_are_those_that_were_published() -> None:
    """Pinned: a run that is resumed or replayed by another release must ask the same."""
    task = Countdown(style="brief", max_value=9)
    assert [task.prompt(0, seq).text for seq in range(3)] == ["2 6 7=19?", "8 5 6 3=35?", "9 6 4 7=41?"]
    assert task.prompt(0, 1) == Countdown(style="brief", max_value=9).prompt(0, 1)
    assert "numbers" in Countdown().prompt(0, 0).messages[0].content


def test_the_rewards_that_it_suggests_are_there() -> None:
    for style in ("chat", "text", "brief"):
        task = load_task("countdown", {"style": style})
        assert [load_reward(name).name for name in task.rewards] == list(task.rewards)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_numbers": 1}, r"min_numbers = 1 is no whole number from 2 to 12"),
        ({"min_numbers": 5}, r"max_numbers = 4 is no whole number from 5 to 12"),
        ({"max_target": 5}, r"max_target = 5 is no whole number of at least 10"),
        ({"style": "txt"}, r"Did you mean 'text'"),
        ({"target": 5}, r"Did you mean 'min_target'|Did you mean 'max_target'"),
    ],
)
def test_options_that_make_no_puzzle(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_task("countdown", options)


def test_targets_that_no_draw_reaches() -> None:
    task = Countdown(max_numbers=3, max_value=2, min_target=90)
    with pytest.raises(UserError, match=r"no target from 90 to 100 with numbers up to 2.*Widen the targets"):
        task.prompt(0, 0)
