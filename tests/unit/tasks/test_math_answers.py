"""Reference answers in the records of GSM8K, MATH and AIME."""

from __future__ import annotations

import pytest

from echo_tasks.math_answers import last_boxed, reference_of


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{42}", "42"),
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{1} no \\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed {7}", "7"),
        ("$\\boxed 7$.", "7"),
        ("\\fbox{8}", "8"),
        ("\\boxed{1", None),
        ("\\boxed", None),
        ("none", None),
        ("\\boxed{}", ""),
        ("\\boxed{" * 50_000, None),
    ],
)
def test_the_last_box_with_its_braces_balanced(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "is_solution", "answer"),
    [
        ("48 + 24 = 72\n#### 72", False, "72"),
        ("Some cost more.\n#### 1,234", True, "1,234"),
        ("Thus $x=\\boxed{\\frac34}$.", True, "\\frac34"),
        ("\\frac{3}{4}", False, "\\frac{3}{4}"),
        ("468", False, "468"),
        ("So it is 3.", True, None),
        ("####", False, None),
        ("\\boxed{ }", True, None),
        ("  ", False, None),
    ],
)
def test_the_answer_that_a_field_holds(text: str, is_solution: bool, answer: str | None) -> None:
    assert reference_of(text, is_solution=is_solution) == answer
