"""The judge of mathematics: what is the same answer, what is not, and what an answer may cost."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from echo_tasks import math_checker
from echo_tasks.bounds import OutOfBounds
from echo_tasks.catalogue import load_reward
from echo_tasks.math_checker import is_right, math, stated_answer
from tests.unit.tasks.samples import sample


def judged(completion: str, reference: str = "42") -> tuple[float, float]:
    """The value, and whether an answer was stated."""
    result = math(sample(completion, {"answer": reference}))
    return result.value, result.components["stated"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("First 41, then \\boxed{42}.", "42"),
        ("\\boxed{41} or rather $\\boxed{\\frac{84}{2}}$", "\\frac{84}{2}"),
        ("<answer>42</answer>", "42"),
        ("<answer>\\boxed{42}</answer>", "42"),
        ("\\boxed{41} <answer>42</answer>", "42"),
        ("48 - 6 = 42\n#### 42\n", "42"),
        ("#### 42\nand so on", "42"),
        ("The answer is 42.", None),
        ("\\boxed{42", None),
        ("", None),
    ],
)
def test_the_last_marked_answer_counts(completion: str, answer: str | None) -> None:
    assert stated_answer(completion) == answer


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "42"),
        ("42", "42.0"),
        ("42", "\\frac{84}{2}"),
        ("1,234", "1234"),
        ("1234", "\\$1,234."),
        ("\\frac12", "\\dfrac{1}{2}"),
        ("\\frac{1}{2}", "0.5"),
        ("-\\frac{3}{4}", "-6/8"),
        ("2", "\\frac{4}{2}"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("\\left(1, 2\\right)", "(1,2)"),
        ("\\{1,2\\}", "\\{2, 1\\}"),
        ("[0,1)", "[0, 1)"),
        ("\\text{Monday}", "\\text{Monday}"),
        ("x=5", "5"),
        ("90^\\circ", "90"),
        ("\\frac{\\pi}{2}", "\\pi/2"),
    ],
)
def test_the_same_answer_in_another_form(reference: str, answer: str) -> None:
    assert is_right(reference, answer)
    assert judged(f"So it is $\\boxed{{{answer}}}$.", reference) == (1.0, 1.0)


@pytest.mark.slow
def test_what_libraries_load_at_their_first_formula_is_not_the_answers_time() -> None:
    script = """
from echo_tasks import math_checker
from echo_tasks.bounds import OutOfBounds
math_checker.CPU_S = 0.25
assert math_checker.is_right("y^2+4y+4", "(y+2)^2")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "43"),
        ("42", "-42"),
        ("42", ""),
        ("42", "42,43"),
        ("42", "\\{42, 43\\}"),
        ("12", "1 2"),
        ("42", "forty-two"),
        ("[0,1)", "[0,1]"),
        ("(1,2)", "(2,1)"),
        ("3.14", "\\pi"),
        ("x+1", "x+2"),
        ("\\frac{1}{2}", "2/1"),
        ("\\frac{1}{2}", "1/0"),
        ("\\frac{1}{2}", "-1/2"),
        ("", ""),
    ],
)
def test_another_answer(reference: str, answer: str) -> None:
    assert judged(f"\\boxed{{{answer}}}", reference)[0] == 0.0


def test_an_answer_that_nothing_marks_is_looked_for_in_the_last_words() -> None:
    assert judged("Adding them up, the answer is 42.") == (1.0, 0.0)
    assert judged("The answer is $\\frac{84}{2}$") == (1.0, 0.0)
    assert judged("The answer is 43.") == (0.0, 0.0)
    assert judged("42 it is. " + "Well. " * 200) == (0.0, 0.0)
    assert judged("") == (0.0, 0.0)


HOSTILE = [
    "9^{9^{9^{9}}}",
    "((10^{9})!)!",
    "\\sum_{n=1}^{10000000} n^n",
    "\\int_0^\\infty e^{x^x} dx",
    "\\prod_{i=1}^{100000} (x+i)",
    "(" * 300 + "1" + ")" * 300,
    "\\frac{1}{" * 100 + "2" + "}" * 100,
    "9" * 900,
    "9" * 100_000,
    "1+" * 490 + "1",
    "\x00",
    "__import__('os').system('true')",
]


@pytest.fixture
def lost_in_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that ends a check may be heard in a callback of the garbage collector (hypothesis has one), which loses what it raises;
    the next signal, a moment later, is not lost. Pytest would report the loss, and fail where the next signal comes in its report."""
    report = sys.unraisablehook

    def heed(lost: Any) -> None:
        if not issubclass(lost.exc_type, OutOfBounds):
            report(lost)

    monkeypatch.setattr(sys, "unraisablehook", heed)


@pytest.mark.usefixtures("lost_in_a_callback")
@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_is_wrong_within_its_bound_and_the_next_is_judged(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound_s = math_checker.CPU_S / 5
    started_s = time.process_time()
    with monkeypatch.context() as patched:
        patched.setattr(math_checker, "CPU_S", bound_s)
        assert judged(f"\\boxed{{{answer}}}")[0] == 0.0
    # Without a bound each takes minutes or never ends. How long the signal waits for C code until Python hears it is the core's speed.
    assert time.process_time() - started_s < 50 * bound_s
    assert judged("\\boxed{\\frac{84}{2}}") == (1.0, 1.0)


@pytest.mark.usefixtures("lost_in_a_callback")
def test_a_hostile_answer_costs_once_however_often_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_checker, "CPU_S", 0.1)
    hostile, compared = "8^{8^{8^{8}}}", []
    compare = math_checker._is_verified

    def counted(reference: list[Any], text: str) -> bool:
        compared.append(hostile in text)
        return compare(reference, text)

    monkeypatch.setattr(math_checker, "_is_verified", counted)
    answers = [f"\\boxed{{{hostile}}}"] * 100
    assert {math(sample(answer, {"answer": "42"})).components["ended"] for answer in answers} == {1.0}
    assert sum(compared) == 1


def test_it_runs_where_it_can_be_ended_and_an_end_is_a_wrong_answer() -> None:
    found = load_reward("math")
    assert (found.isolated, found.at_timeout) == (True, 0.0)
