"""A run from a file of logged hands to its last step: no worker, no feeder; bad lines skipped, groups trained at importance weight 1."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from echo_schemas.naming import Namespace
from echo_schemas.records import LogprobSource, Reward, StepReport, Trajectory, TrajectorySource
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES
from echo_tasks.poker import KuhnPoker
from tests.installed import missing
from tests.integration.tasks.chat_model import write_model
from tests.integration.tasks.toy_runs import RUN_S, run_to_end

_MISSING = missing("torch", "transformers", "faust", "deepspeed", "pyspiel")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.timeout(RUN_S + 600),
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]
NUM_HANDS, GROUP_SIZE, NUM_STEPS = 6, 4, 3
CONFIG = """
[run]
name = "offline"
[task]
name = "kuhn-poker"
[offline]
episodes = "{episodes}"
[policy]
base = "{base}"
max_length = 1200
lora = {{ r = 4, alpha = 4 }}
[rollout]
workers = 0
group_size = 4
[rewards]
return = 1.0
[learner]
groups_per_step = 2
updates_per_step = 2
steps = 3
[staleness]
budget = 1
"""


def logged_hands() -> list[str]:
    """Hands of Kuhn poker that a random player played, several times each, as lines of the file."""
    task, rng, lines = KuhnPoker(opponents="equilibrium"), random.Random(0), []
    for seq in range(NUM_HANDS):
        prompt = task.prompt(1, seq)
        for _ in range(GROUP_SIZE):
            messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
            episode, rewards, done = task.environment(prompt.entry), [], False
            while not done:
                answer = f"<answer>{rng.choice(['Check', 'Bet', 'Call', 'Fold'])}</answer>"
                turn = episode.step(answer)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn.observation or "The hand is over."}]
                rewards.append(turn.reward)
                done = turn.done
            lines.append(json.dumps({"messages": messages, "rewards": rewards, "group": seq, "entry": dict(prompt.entry)}))
    return lines


def test_logged_hands_are_trained(tmp_path: Path, kafka_bootstrap: str) -> None:
    lines = logged_hands()
    lines[1:1] = ["{", '{"messages": [], "return": 1}']
    file = tmp_path / "hands.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(episodes=file, base=write_model(tmp_path / "base")), encoding="utf-8")
    run = run_to_end(config, {}, folder=tmp_path, bootstrap=kafka_bootstrap, namespace=Namespace("it.offline").name)
    assert (run.summary["outcome"], run.summary["steps"]) == ("finished", NUM_STEPS)
    assert "line 2 is skipped (not_json)" in run.logs
    assert "line 3 is skipped (not_messages)" in run.logs

    samples = run.records(TRAJECTORIES, Trajectory)
    assert len(samples) == NUM_HANDS * GROUP_SIZE
    assert sorted({sample.seq for sample in samples.values()}) == list(range(NUM_HANDS))
    for sample in samples.values():
        assert (sample.source, sample.logprob_source) == (TrajectorySource.OFFLINE, LogprobSource.RECOMPUTED)
        assert len(sample.generated) == len(sample.turn_rewards)
        assert sample.prompt.endswith("<|im_start|>assistant\n")
    for reward in run.records(REWARDS, Reward).values():
        assert reward.value == pytest.approx(sum(samples[reward.of].turn_rewards))
    reports = list(run.records(STEPS, StepReport).values())
    assert [report.version for report in reports] == [1, 2, 3]
    for report in reports:
        assert report.staleness_total[0] == 2 * GROUP_SIZE
        assert report.metrics["recomputed_fraction"] == 1.0
        assert report.metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1e-5)
