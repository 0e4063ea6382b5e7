"""What the demo's models practise: written with their tokens alone, right, and of the task that the demo then asks."""

from __future__ import annotations

import random
import tomllib
from importlib import resources

import pytest

from echo_tasks.base_models import DEMO_MODELS
from echo_tasks.practice import KNIGHTS_KNAVES_OPTIONS, PRACTICES, SOKOBAN_OPTIONS
from echo_tasks.sokoban import Sokoban

NUM_EXAMPLES = 60
# What `tiny_qwen3` has room for, beside padding and end.
MOST_TOKENS = 30


def examples(name: str) -> list[list[str]]:
    rng = random.Random(5)
    practice = PRACTICES[name]()
    return [list(practice.example(rng)) for _ in range(NUM_EXAMPLES)]


@pytest.mark.parametrize("name", ["reverse", "sort", "sokoban", "knights-knaves"])
def test_examples_are_written_with_the_practices_tokens(name: str) -> None:
    if name == "knights-knaves":
        pytest.importorskip("reasoning_gym", reason="its puzzles are reasoning-gym's: install the extra 'tasks'")
    practice = PRACTICES[name]()
    assert len(set(practice.tokens)) == len(practice.tokens) <= MOST_TOKENS
    made = examples(name)
    assert made == examples(name), "the same examples from the same numbers"
    for part in (part for example in made for part in example):
        tokens = practice.split(part)
        assert "".join(tokens) == part
        assert set(tokens) <= set(practice.tokens)
    assert all(len(example) % 2 == 0 for example in made), "what is shown and what is answered, in turn"


@pytest.mark.parametrize("name", ["reverse", "sort"])
def test_digits_are_answered(name: str) -> None:
    for shown, said in examples(name):
        digits = shown.removesuffix(">")
        assert said == (digits[::-1] if name == "reverse" else "".join(sorted(digits)))


def test_the_last_answer_solves_the_last_board() -> None:
    made = examples("sokoban")
    assert {len(example) for example in made} == {2, 4}, "one round, and two"
    for example in made:
        board, answer = example[-2:]
        rows = ["#####", *(f"#{row}#" for row in board.splitlines()), "#####"]
        turn = Sokoban(**SOKOBAN_OPTIONS).environment({"board": "\n".join(rows)}).step(answer)  # type: ignore[arg-type]
        assert (turn.reward, turn.done) == (1.0, True)


def test_a_first_answer_that_failed_leads_to_the_board_shown_next() -> None:
    failed = [example for example in examples("sokoban") if len(example) == 4]
    for board, answer, following, _ in failed:
        rows = ["#####", *(f"#{row}#" for row in board.splitlines()), "#####"]
        turn = Sokoban(**SOKOBAN_OPTIONS).environment({"board": "\n".join(rows)}).step(answer)  # type: ignore[arg-type]
        assert turn.observation == following


@pytest.mark.parametrize(("demo", "options"), [("sokoban", SOKOBAN_OPTIONS), ("knights-knaves", KNIGHTS_KNAVES_OPTIONS)])
def test_the_demo_asks_what_was_practised(demo: str, options: dict[str, object]) -> None:
    packaged = tomllib.loads(resources.files("echo_ops.demo").joinpath(f"{demo}.toml").read_text(encoding="utf-8"))
    assert packaged["task"] == {"name": demo, "options": options}
    assert DEMO_MODELS[packaged["policy"]["base"]] == demo
