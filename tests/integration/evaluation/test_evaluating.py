"""A run that evaluates itself, and `echoswarm eval` afterwards and beside it: real Kafka, the engine transformers, Faust, DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_core.evaluation import held_out_seed
from echo_learner.evaluation.setup import read_evaluations
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import Eval, Purpose, StepReport, Trajectory
from echo_schemas.topics import STEPS, TRAJECTORIES, Topic
from echo_settings import load_settings
from tests.installed import missing
from tests.thorough import IS_THOROUGH

_MISSING = missing("torch", "transformers", "peft", "faust", "deepspeed")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]
WAIT_S = 900.0
RUN_FILE = """
[run]
name = "evaluated"

[policy]
max_length = 24

[rollout]
engine = "transformers"
group_size = 4
groups_in_flight = 8

[learner]
groups_per_step = 4
steps = 3

[staleness]
budget = 2
publication_period = 1

[[eval]]
name = "held-out"
prompts = 6
samples = 2
pass_at = [1, 2]
top_p = 0.9
every = 2
"""


class Run:
    """One run file and the commands on it."""

    def __init__(self, folder: Path, bootstrap: str, namespace: str) -> None:
        self.file = folder / "run.toml"
        self.file.write_text(RUN_FILE, encoding="utf-8")
        self.folder = folder
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
            "ECHO_KAFKA__BOOTSTRAP": bootstrap,
            "ECHO_KAFKA__NAMESPACE": namespace,
            "ECHO_CHECKPOINT__FOLDER": str(folder / "run"),
            "ECHO_STATE_FOLDER": str(folder / "state"),
        }

    def command(self, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "echo_ops.cli", *arguments, "--config", str(self.file)]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        return done.returncode, done.stdout

    @property
    def bus(self) -> Bus:
        return open_bus(load_settings(self.file, self.environ), "view")

    def results(self) -> dict[tuple[int, str], Eval]:
        found = read_evaluations(self.bus)
        assert len({(each.version, each.name) for each in found}) == len(found), "a result stands there twice"
        return {(each.version, each.name): each for each in found}

    def records(self, topic: Topic) -> list[object]:
        with closing(self.bus.reader([topic])) as reader:
            reader.start()
            return [message.record for messages in reader.read_to_end(Deadline.after(WAIT_S)) for message in messages]


def test_a_run_evaluates_itself_and_any_kept_version_can_be_evaluated_afterwards(
    tmp_path: Path, kafka_bootstrap: str, namespace: Namespace
) -> None:
    run = Run(tmp_path, kafka_bootstrap, namespace.name)
    code, output = run.command("up", "--plain")
    assert code == 0, output
    results = run.results()
    assert {(0, "held-out"), (3, "held-out")} <= set(results) <= {(0, "held-out"), (2, "held-out"), (3, "held-out")}
    assert "evaluation held-out  v3" in output
    assert "Evaluation held-out" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for result in results.values():
        assert (result.num_prompts, result.num_missing, result.num_samples) == (6, 0, 12)
        assert [each.k for each in result.pass_at] == [1, 2]
        assert result.seed == held_out_seed(0)
    answers = [each for each in run.records(TRAJECTORIES) if isinstance(each, Trajectory) and each.purpose is Purpose.EVAL]
    assert {each.min_version for each in answers} == {version for version, _ in results}
    assert all(each.min_version == each.max_version and each.sampling.top_p == 0.9 for each in answers)
    shas = {each.min_version: each.weights_sha256 for each in answers}
    assert {version: result.weights_sha256 for (version, _), result in results.items()} == shas
    trained = {report.version for report in run.records(STEPS) if isinstance(report, StepReport)}
    assert trained == {1, 2, 3}, "training went on beside"

    code, output = run.command("eval", "--version", "1", "--version", "3")
    assert code == 0, output
    assert "evaluation held-out  v1" in output
    assert "v3" in output.partition("recorded earlier")[0], "what is recorded is shown, not evaluated again"
    assert (1, "held-out") in run.results()

    if IS_THOROUGH:
        code, output = run.command("eval", "--version", "2", "--name", "greedy", "--prompts", "3", "--temperature", "0")
        assert code == 0, output
        assert run.results()[2, "greedy"].num_prompts == 3

    code, output = run.command("eval", "--version", "9")
    assert code == 2
    assert "Kept: 0 to 3" in output.replace("\n", " ")
