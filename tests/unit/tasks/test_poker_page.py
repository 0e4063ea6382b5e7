"""docs/tasks/poker.md and the examples: every option has a row, every state shown is one, every example makes its task and rewards."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from echo_settings import load_settings
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.poker import KuhnPoker, Poker, kuhn, opponents
from echo_tasks.poker.episode import FORM, AnswerKind, turn_text

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tasks" / "poker.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["poker", "kuhn-poker"])
def test_an_example_makes_its_task_and_rewards(name: str) -> None:
    settings = load_settings(ROOT / "examples" / f"{name}.toml", {})
    task = load_task(settings.task.name, settings.task.options)
    assert task.name == name == settings.run.name
    assert [function.name for function in map(load_reward, settings.rewards)] == list(task.rewards) == ["return"]
    prompt = task.prompt(settings.run.seed, 0)
    assert task.environment(prompt.entry) is not None


@pytest.mark.parametrize(("task", "title"), [(Poker, "poker"), (KuhnPoker, "kuhn-poker")])
def test_every_option_has_a_row(task: type[Any], title: str) -> None:
    section = PAGE.split(f"## Options of `{title}`\n", 1)[1].split("\n## ", 1)[0]
    named = [name for cell in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)]
    assert named == list(inspect.signature(task).parameters)


def test_every_opponent_and_every_verdict_is_explained() -> None:
    for name in (*kuhn.OPPONENTS, *opponents.OPPONENTS):
        assert f"`{name}`" in PAGE
    assert {f"`{verdict.value}`" for verdict in AnswerKind if verdict is not AnswerKind.FINE} <= set(re.findall(r"`\w+`", PAGE))


def test_the_state_that_is_shown_is_one() -> None:
    ranks, suits = "23456789TJQKA", "cdhs"
    cards = [ranks.index(name[0]) * 4 + suits.index(name[1]) for name in ["3s", "4s", "Ah", "Ad", "2c", "7d", "9h", "Jc", "Kd"]]
    task = Poker(players=2)
    entry = {"cards": cards, "seat": 0, "opponents": ["tight", "tight"], "seed": "page"}
    turn = task.environment(entry).step("<answer>Call</answer>")
    assert turn.observation in PAGE
    assert turn_text(2, "") == f"Turn 2\n\n{FORM}"
