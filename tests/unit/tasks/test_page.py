"""The page on tasks, docs/tasks.md: its snippets are loaded as a user's files and do what the page says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import FinishReason, Span
from echo_settings import load_settings
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.rewards import RewardKind, ScoredSample, sample_of
from tests.unit.core.records import trajectory

PAGE = Path(__file__).parents[3] / "docs" / "tasks.md"
BLOCK = re.compile(r"```(python|toml)\n(.*?)```", re.DOTALL)
SAMPLE = ScoredSample(
    prompt="17+25=",
    completion="41",
    entry={"answer": 42},
    token_ids=np.array([1, 2, 3], np.int32),
    num_generated=3,
    turn_rewards=(),
    finish_reason=FinishReason.STOP,
    metadata={},
    task="sums",
)


def blocks(language: str) -> list[str]:
    """The page's snippets in one language, in order."""
    return [text for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if kind == language]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with every Python snippet under the name in its first line."""
    for text in blocks("python"):
        first = text.splitlines()[0]
        assert first.startswith("# "), "a snippet names its file"
        (tmp_path / first.removeprefix("# ")).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_task_is_found_with_the_options_of_the_run_file(files: Path) -> None:
    path = files / "run.toml"
    path.write_text(blocks("toml")[0], encoding="utf-8")
    settings = load_settings(path, {})
    task = load_task(settings.task.name, settings.task.options)
    prompts = [task.prompt(0, seq) for seq in range(100)]
    assert prompts == [task.prompt(0, seq) for seq in range(100)]
    for prompt in prompts:
        a, b = (int(part) for part in prompt.text.removesuffix("=").split("+"))
        assert a + b == prompt.entry["answer"]
        assert max(a, b) <= 20
    (exact,) = map(load_reward, settings.rewards)
    assert exact(replace(SAMPLE, completion=str(prompts[0].entry["answer"]), entry=prompts[0].entry)) == 1.0


@pytest.mark.usefixtures("files")
def test_the_rewards_judge() -> None:
    brevity, digits, rank = (load_reward(f"my_rewards.py:{name}") for name in ("brevity", "digits", "rank"))
    assert [function.kind for function in (brevity, digits, rank)] == [RewardKind.SYNC, RewardKind.ASYNC, RewardKind.BATCH]
    assert (brevity(SAMPLE), brevity.timeout_s) == (0.25, 2.0)
    result = asyncio.run(digits(SAMPLE))
    assert (result.value, result.components) == (0.5, {"right": 1.0})
    assert rank([SAMPLE, replace(SAMPLE, completion="042")]) == [1.0, 0.0]


def test_another_process_finds_a_function_by_its_origin(files: Path) -> None:
    """A decorated function cannot be pickled, its name stands for a RewardFunction: the origin is what travels."""
    names = ("my_rewards.py:brevity", "my_rewards.py:rank", "exact")
    origins = [load_reward(name).origin for name in names]
    code = f"from echo_tasks.catalogue import load_reward; print(*(load_reward(origin).name for origin in {origins!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240, cwd=files)
    assert done.stdout.split() == [name.rpartition(":")[2] for name in names]


@pytest.mark.usefixtures("files")
def test_the_entry_points_name_what_the_snippets_define(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.syspath_prepend(str(files))
    points = tomllib.loads(blocks("toml")[1])["project"]["entry-points"]
    assert load_task(points["echoswarm.tasks"]["sums"]).name == "sums"
    assert load_reward(points["echoswarm.rewards"]["brevity"]).name == "brevity"


@pytest.mark.usefixtures("files")
def test_an_episode_of_several_turns() -> None:
    task = load_task("my_hunt.py:Hunt")
    environment = task.environment(task.prompt(0, 7).entry)
    assert environment is not None
    assert environment.reset().text == ""
    turns = [environment.step(guess) for guess in ("5", "9", "7")]
    assert [(turn.observation, turn.done) for turn in turns] == [(">", False), ("<", False), ("", True)]
    assert environment.step("five").reward == -1.0
    episode = trajectory(
        token_ids=pack_tokens([9, 5, 1, 9, 0, 7, 7]),
        generated=(Span(start=1, end=2), Span(start=3, end=4), Span(start=5, end=7)),
        logprobs=pack_logprobs([-0.5] * 4),
        version_spans=(replace(trajectory().version_spans[0], start=1, end=7),),
        turn_rewards=tuple(turn.reward for turn in turns),
    )
    mask = task.signals(episode).mask
    assert mask is not None
    assert mask.tolist() == [False, False, True, True]
    (total,) = map(load_reward, task.rewards)
    assert total(sample_of(episode)) == pytest.approx(0.8)


def test_every_snippet_is_run_here() -> None:
    assert [text.splitlines()[0] for text in blocks("python")] == ["# my_tasks.py", "# my_rewards.py", "# my_hunt.py"]
    assert len(blocks("toml")) == 2
