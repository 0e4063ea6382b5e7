"""The poker examples' runs at toy size: hold'em with a chat model of a few thousand weights, Kuhn poker with the demo's tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_schemas.naming import Namespace
from echo_schemas.records import Reward, StepReport, Trajectory
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES
from tests.installed import missing
from tests.integration.tasks.chat_model import write_model
from tests.integration.tasks.toy_runs import ROOT, RUN_S, ToyRun, run_to_end

_MISSING = missing("torch", "transformers", "faust", "deepspeed", "pyspiel")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.timeout(RUN_S + 600),
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]
NUM_STEPS = 2
TOY = {
    "ECHO_POLICY__LORA__R": "4",
    "ECHO_ROLLOUT__ENGINE": "transformers",
    "ECHO_ROLLOUT__GROUP_SIZE": "4",
    "ECHO_LEARNER__GROUPS_PER_STEP": "2",
    "ECHO_LEARNER__UPDATES_PER_STEP": "1",
    "ECHO_LEARNER__STEPS": str(NUM_STEPS),
}


def check(run: ToyRun) -> list[Trajectory]:
    """The run did its steps, and every episode's return is the sum of its turns' rewards."""
    assert (run.summary["outcome"], run.summary["steps"]) == ("finished", NUM_STEPS)
    assert [report.version for report in run.records(STEPS, StepReport).values()] == list(range(1, NUM_STEPS + 1))
    samples = run.records(TRAJECTORIES, Trajectory)
    scored = {reward.of: reward.value for reward in run.records(REWARDS, Reward).values() if reward.value is not None}
    assert len(scored) >= NUM_STEPS * 2 * 4
    for where, value in scored.items():
        assert value == pytest.approx(sum(samples[where].turn_rewards))
    return [sample for sample in samples.values() if len(sample.turn_rewards)]


def test_hands_of_holdem_are_played_in_turns_of_a_chat(tmp_path: Path, kafka_bootstrap: str) -> None:
    changes = {
        **TOY,
        "ECHO_POLICY__DTYPE": "float32",
        "ECHO_POLICY__BASE": str(write_model(tmp_path / "base")),
        "ECHO_POLICY__MAX_LENGTH": "2400",
        "ECHO_ROLLOUT__MAX_NEW_TOKENS": "60",
    }
    config = ROOT / "examples" / "poker.toml"
    run = run_to_end(config, changes, folder=tmp_path, bootstrap=kafka_bootstrap, namespace=Namespace("it.poker").name)
    for sample in check(run):
        assert "Texas hold'em" in sample.prompt
        assert "Turn 1\nState: Hand: [" in sample.prompt
        assert len(json.loads(sample.entry)["cards"]) == 2 * 6 + 5
        assert len(sample.turn_rewards) == len(sample.generated)


def test_kuhn_poker_is_played_in_digits(tmp_path: Path, kafka_bootstrap: str) -> None:
    config = ROOT / "examples" / "kuhn-poker.toml"
    run = run_to_end(config, TOY, folder=tmp_path, bootstrap=kafka_bootstrap, namespace=Namespace("it.kuhn-poker").name)
    samples = check(run)
    assert {sample.prompt[0] for sample in samples} <= {"0", "1", "2"}
    assert all(len(sample.turn_rewards) == len(sample.generated) <= 2 for sample in samples)
