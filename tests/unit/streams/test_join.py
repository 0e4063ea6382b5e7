"""What [rewards] names is what the learner waits for and what the reward application writes: names and paths alike."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo_core.assembly import GroupAssembler
from echo_core.groups import AssemblyLimits
from echo_learner.training.config import reward_terms
from echo_settings import load_settings
from echo_streams.run import attach
from echo_streams.scoring import Judgeable
from tests.unit.core.records import GROUP_SIZE, at, trajectory
from tests.unit.streams.stage import scorer

LIMITS = AssemblyLimits(max_open_groups=10, max_early_rewards=100, group_timeout_s=60, reward_timeout_s=30)


def test_a_reward_by_path_joins_under_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "joined_rewards.py").write_text(
        "from echo_tasks.rewards import reward\n\n\n@reward(name='short')\ndef brevity(sample):\n    return 0.25\n", encoding="utf-8"
    )
    (tmp_path / "run.toml").write_text('[rewards]\nexact = 1.0\n"joined_rewards.py:brevity" = 0.5\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(Path("run.toml"), {})

    terms = reward_terms(settings)
    assembler = GroupAssembler("demo", terms, LIMITS)
    group = [Judgeable(trajectory=trajectory(0, index, entry='{"answer": "c"}'), at=at(index)) for index in range(GROUP_SIZE)]
    for item in group:
        assembler.add_trajectory(item.at, item.trajectory)
    assert not assembler.ready
    for offset, reward in enumerate(asyncio.run(scorer(*attach(tuple(settings.rewards))).score(group))):
        assembler.add_reward(at(offset), reward)
    (ready,) = assembler.ready
    values = [{name: score.value for name, score in member.scores.items()} for member in ready.members]
    assert values == [{"exact": 1.0, "joined_rewards.py:brevity": 0.25}] * GROUP_SIZE
    assert [(term.name, term.weight) for term in terms] == [("exact", 1.0), ("joined_rewards.py:brevity", 0.5)]
