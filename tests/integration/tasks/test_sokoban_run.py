"""The example's run at toy size: examples/sokoban.toml with a chat model of a few thousand weights, on a real Kafka, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import Coordinates, Record, Reward, StepReport, Trajectory
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES, Topic
from echo_settings import load_settings
from echo_tasks.prompts import PromptCodec
from tests.installed import missing
from tests.integration.tasks.chat_model import write_model
from tests.thorough import only_thorough

_MISSING = missing("torch", "transformers", "faust", "deepspeed")
RUN_S = 1_500
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    only_thorough,
    pytest.mark.timeout(RUN_S + 600),
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]
ROOT = Path(__file__).parents[3]
NUM_STEPS = 2
# What is smaller than in the example; the rest is as it stands there.
TOY = {
    "ECHO_POLICY__DTYPE": "float32",
    "ECHO_POLICY__MAX_LENGTH": "1600",
    "ECHO_POLICY__LORA__R": "4",
    "ECHO_ROLLOUT__ENGINE": "transformers",
    "ECHO_ROLLOUT__GROUP_SIZE": "4",
    "ECHO_ROLLOUT__MAX_NEW_TOKENS": "80",
    "ECHO_LEARNER__GROUPS_PER_STEP": "2",
    "ECHO_LEARNER__STEPS": str(NUM_STEPS),
}
R = TypeVar("R", bound=Record)


def read(bus: Bus, topic: Topic, kind: type[R]) -> dict[Coordinates, R]:
    """The run's records of one kind, by where they lie."""
    with closing(bus.reader([topic])) as reader:
        reader.start()
        messages = [message for batch in reader.read_to_end(Deadline.after(60)) for message in batch]
    return {message.coordinates: message.record for message in messages if isinstance(message.record, kind)}


def test_the_example_plays_rounds_and_trains_on_its_answers_alone(tmp_path: Path, kafka_bootstrap: str) -> None:
    base = write_model(tmp_path / "base")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
        **TOY,
        "ECHO_POLICY__BASE": str(base),
        "ECHO_KAFKA__BOOTSTRAP": kafka_bootstrap,
        "ECHO_KAFKA__NAMESPACE": Namespace("it.sokoban").name,
        "ECHO_CHECKPOINT__FOLDER": str(tmp_path / "run"),
    }
    config = ROOT / "examples" / "sokoban.toml"
    command = [sys.executable, "-m", "echo_ops.cli", "up", "--config", str(config), "--plain"]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)
    logs = "".join(f"\n--- {log.name}\n{log.read_text(encoding='utf-8')[-3_000:]}" for log in sorted(tmp_path.glob("run/logs/*.log")))
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{logs}"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["outcome"], summary["steps"]) == ("finished", NUM_STEPS)

    bus, codec = open_bus(load_settings(config, environ), "test"), PromptCodec(base)
    samples = read(bus, TRAJECTORIES, Trajectory)
    assert len(samples) >= NUM_STEPS * 2 * 4
    assert {len(sample.generated) for sample in samples.values()} - {1}, "some episodes have more than one round"
    for sample in samples.values():
        assert sample.prompt.endswith("<|im_start|>assistant\n")
        assert len(sample.turn_rewards) == len(sample.generated) <= 4
        assert codec.decode(sample.tokens[: sample.generated[0].start]) == sample.prompt
        # Between two answers stands the user's turn, as the template words it, and nothing of it is generated.
        for number, (one, following) in enumerate(zip(sample.generated, sample.generated[1:], strict=False), start=2):
            between = codec.decode(sample.tokens[one.end : following.start])
            assert between.removeprefix("<|im_end|>").startswith(f"\n<|im_start|>user\nTurn {number} of 4:\n######")
            assert between.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert sample.num_generated == sum(span.end - span.start for span in sample.generated) == len(sample.logprobs) // 4
    returns: dict[Coordinates, list[float | None]] = defaultdict(list)
    for reward in read(bus, REWARDS, Reward).values():
        returns[reward.of].append(reward.value)
    scored = [(sum(samples[where].turn_rewards), value) for where, values in returns.items() for value in values if value is not None]
    assert len(scored) >= NUM_STEPS * 2 * 4
    assert all(value == pytest.approx(earned) for earned, value in scored)
    assert [report.version for report in read(bus, STEPS, StepReport).values()] == list(range(1, NUM_STEPS + 1))
