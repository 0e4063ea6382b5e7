"""`echoswarm up` with vLLM's own OpenAI-compatible server as the engine: the run begins, trains and ends as with any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from importlib import resources
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import LogprobSource, Purpose, Trajectory
from echo_schemas.topics import TRAJECTORIES
from echo_settings import load_settings
from tests.installed import missing
from tests.thorough import only_thorough

_MISSING = missing("vllm", "faust", "deepspeed")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]

STEPS_TRAINED = 3
# A server imports vLLM in three processes, one after another.
WAIT_S = 1_500.0
CHANGES = {
    'engine = "vllm"': 'engine = "openai"',
    "groups_per_step = 64": "groups_per_step = 16",
    "groups_in_flight = 64": "groups_in_flight = 16",
}


@only_thorough
def test_a_run_on_a_server_of_its_own(tmp_path: Path, kafka_bootstrap: str) -> None:
    text = resources.files("echo_ops.demo").joinpath("reverse.toml").read_text(encoding="utf-8")
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "run.toml"
    config.write_text(text, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
        "ECHO_KAFKA__BOOTSTRAP": kafka_bootstrap,
        "ECHO_KAFKA__NAMESPACE": Namespace("e2e.openai-run").name,
        "ECHO_CHECKPOINT__FOLDER": str(tmp_path / "run"),
    }
    summary_file = tmp_path / "summary.json"
    command = [sys.executable, "-m", "echo_ops.cli", "up", "--config", str(config), "--plain"]
    command += ["--steps", str(STEPS_TRAINED), "--summary", str(summary_file)]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    logs = "".join(f"\n--- {log.name}\n{log.read_text(encoding='utf-8')[-3_000:]}" for log in sorted((tmp_path / "run").glob("logs/*.log")))
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{logs}"

    summary = json.loads(summary_file.read_text(encoding="utf-8"))
    assert (summary["outcome"], summary["steps"], summary["workers"][0]["engine"]) == ("finished", STEPS_TRAINED, "openai")
    assert summary["max_staleness"] <= 3
    assert summary["logprob_samples"] >= 4
    assert summary["logprob_max_diff"] <= 1e-4
    assert [each["version"] for each in summary["evaluations"]] == [0, STEPS_TRAINED]
    with closing(open_bus(load_settings(config, environ), "test").reader([TRAJECTORIES])) as reader:
        reader.start()
        records = [message.record for batch in reader.read_to_end(Deadline.after(60)) for message in batch]
    trained = [record for record in records if isinstance(record, Trajectory) and record.purpose is Purpose.TRAIN]
    assert len(trained) >= summary["trajectories_trained"] > 0
    assert {record.engine for record in trained} == {"openai"}
    assert {record.logprob_source for record in trained} == {LogprobSource.SAMPLER}
