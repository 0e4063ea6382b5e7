"""The page on rewards, docs/rewards.md: its snippets run, its settings load, its tables are complete."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_schemas.records import RewardOutcome
from echo_settings import Settings, load_settings
from echo_streams.metrics import StreamsMetrics
from echo_streams.run import attach
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import RewardKind
from tests.unit.streams.stage import judgeable, scorer

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The page's only snippet in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with the page's file."""
    text = block("python")
    (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def settings() -> Settings:
    Path("run.toml").write_text(block("toml"), encoding="utf-8")
    return load_settings(Path("run.toml"), {})


def test_the_rewards_of_the_run_file_judge_under_their_keys() -> None:
    attached = attach(tuple(settings().rewards))
    assert [entry.function.kind for entry in attached] == [RewardKind.SYNC, RewardKind.SYNC, RewardKind.ASYNC]
    rewards = asyncio.run(scorer(*attached).score(judgeable(1, entry='{"answer": 0}')))
    assert {reward.name: (reward.value, reward.components) for reward in rewards} == {
        "exact": (1.0, {}),
        "my_rewards.py:brevity": (1 / 3, {}),
        "my_rewards.py:judge": (1.0, {"right": 1.0, "polite": 0.0}),
    }
    assert attached[2].function.timeout_s == 20.0


def test_the_batch_reward_gives_a_value_per_sample() -> None:
    rank = load_reward("my_rewards.py:rank")
    assert rank.kind is RewardKind.BATCH
    rewards = asyncio.run(scorer(*attach(("my_rewards.py:rank",))).score([*judgeable(1), *judgeable(11)[10:]]))
    assert [reward.value for reward in rewards] == [0.5, 0.0]


def test_the_settings_of_the_page_are_the_defaults_except_for_processes() -> None:
    given, default = settings().scoring.model_dump(), Settings().scoring.model_dump()
    assert {name for name in given if given[name] != default[name]} == {"processes"}
    assert settings().scoring.model_fields_set == set(default)


def test_every_command_of_the_page_is_one() -> None:
    from typer.main import get_command

    from echo_ops.cli.main import app

    commands = re.findall(r"^\$ (echoswarm .*)$|`(echoswarm run reward --[^`]*)`", PAGE, re.MULTILINE)
    lines = [first or " ".join(second.split()) for first, second in commands]
    assert len(lines) >= 8
    for line in lines:
        command, words = get_command(app), shlex.split(line)[1:]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("echoswarm", words)


def test_every_outcome_and_metric_is_on_the_page() -> None:
    assert {outcome.value for outcome in RewardOutcome if f"`{outcome.value}`" not in PAGE} == set()
    for family in StreamsMetrics().registry.collect():
        (line,) = (
            line for line in PAGE.splitlines() if line.startswith("| `echo_streams_") and re.search(rf"`{family.name}(_total)?[`{{]", line)
        )
        assert family.documentation in line


def test_the_limits_of_the_page_are_the_real_ones() -> None:
    limits = DeadLetterLimits()
    assert f"more than {limits.per_writer} unreadable messages a minute from one writer" in PAGE
