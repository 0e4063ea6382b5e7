"""`echoswarm up` with a pool of two engines: vLLM's own server and transformers sample one run, each saying truly under which version and
how likely."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.errors import TransportError
from echo_rollout.weights.sources import PublishedSource
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, RunControl, RunState, StepReport, Trajectory, WeightManifest, WorkerState, WorkerStatus
from echo_schemas.topics import CONTROL, STEPS, TRAJECTORIES, WEIGHTS, WORKERS
from echo_settings import load_settings
from tests.installed import missing
from tests.thorough import only_thorough

_MISSING = missing("vllm", "faust", "deepspeed")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    only_thorough,
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]

WAIT_S = 1_500.0
ENGINES = {"openai", "transformers"}
ENOUGH = 128
"""Trajectories of each engine, with which the run is stopped, given a step: how long an engine takes to start is nobody's to say."""
# As the demo's: two correct implementations differ by 1e-5 in float32, a wrong adapter by 1e-2 and more.
AGREEMENT = 1e-4
POOL = """
[[rollout.pool]]
name = "server"
engine = "openai"
price_per_hour = 2.0
groups_in_flight = 16

[[rollout.pool]]
name = "laptop"
engine = "transformers"
price_per_hour = 0.1
groups_in_flight = 4
"""


@dataclass(frozen=True)
class Ended:
    """A run that has ended, and what it left."""

    summary: dict[str, Any]
    report: str
    base: str
    bus: Bus
    trajectories: list[Trajectory]
    steps: list[StepReport]
    manifests: dict[int, WeightManifest]


def await_enough(bus: Bus, process: subprocess.Popen[bytes]) -> None:
    """Until each engine has delivered `ENOUGH` and a step has been made of them; the topics are made meanwhile.

    The run is paused until both are there: a server takes minutes to start, in which the other engine would train alone.
    """

    def statuses() -> list[WorkerStatus]:
        with closing(bus.view(WORKERS, WorkerStatus)) as workers:
            return list(workers.items().values())

    def newest() -> int:
        with closing(bus.view(WEIGHTS, WeightManifest)) as weights:
            return max((manifest.version for manifest in weights.items().values()), default=0)

    def ordered(state: RunState, epoch: int) -> bool:
        control = Control(run_id=bus.run_id or "", epoch=epoch, run=RunControl(state=state), issued_by="test", time_ms=0)
        with closing(bus.publisher()) as publisher:
            return publisher.publish(CONTROL, control).wait(60) is not None

    awaited: list[tuple[str, Callable[[], bool]]] = [
        ("the run to be paused", lambda: ordered(RunState.PAUSED, 1)),
        ("both engines", lambda: {each.engine for each in statuses() if each.state is WorkerState.READY} == ENGINES),
        ("the run to go on", lambda: ordered(RunState.RUNNING, 2)),
        ("both to deliver", lambda: {each.engine for each in statuses() if each.rollouts >= ENOUGH} == ENGINES),
        ("a step", lambda: newest() >= 1),
    ]
    deadline, nap = Deadline.after(WAIT_S), threading.Event()
    for what, has_come in awaited:
        while True:
            assert process.poll() is None, "the run has ended"
            assert not deadline.expired(), f"waited for {what}"
            try:
                if has_come():
                    break
            except TransportError:
                # The cluster does not know the topics yet.
                pass
            nap.wait(1.0)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, kafka_bootstrap: str) -> Ended:
    folder = tmp_path_factory.mktemp("mixed")
    namespace = Namespace(f"e2e.{folder.name.replace('_', '-')}")
    demo = resources.files("echo_ops.demo").joinpath("reverse.toml").read_text(encoding="utf-8").replace("workers = 1\n", "", 1)
    config = folder / "run.toml"
    config.write_text(demo + POOL, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
        "ECHO_KAFKA__BOOTSTRAP": kafka_bootstrap,
        "ECHO_KAFKA__NAMESPACE": namespace.name,
        "ECHO_CHECKPOINT__FOLDER": str(folder / "run"),
    }
    command = [sys.executable, "-m", "echo_ops.cli", "up", "--config", str(config), "--plain", "--steps", "0"]
    settings = load_settings(config, environ)
    bus = open_bus(settings, "test")
    output = folder / "output.txt"
    with output.open("wb") as file, subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file) as process:
        try:
            await_enough(bus, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)
    logs = "".join(f"\n--- {log.name}\n{log.read_text(encoding='utf-8')[-3_000:]}" for log in sorted((folder / "run").glob("logs/*.log")))
    assert process.returncode == 130, output.read_text(encoding="utf-8") + logs
    with closing(bus.reader([TRAJECTORIES, STEPS, WEIGHTS])) as reader:
        reader.start()
        records = [message.record for batch in reader.read_to_end(Deadline.after(60)) for message in batch]
    return Ended(
        summary=json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8")),
        report=(folder / "run" / "report.html").read_text(encoding="utf-8"),
        base=settings.policy.base,
        bus=bus,
        trajectories=[record for record in records if isinstance(record, Trajectory)],
        steps=[record for record in records if isinstance(record, StepReport)],
        manifests={record.version: record for record in records if isinstance(record, WeightManifest)},
    )


def test_both_engines_deliver_and_the_report_says_what_each_did(ended: Ended) -> None:
    assert ended.summary["outcome"] == "interrupted"
    lines = {line["kind"]: line for line in ended.summary["workers"]}
    assert {kind: line["engine"] for kind, line in lines.items()} == {"server": "openai", "laptop": "transformers"}
    for line in lines.values():
        assert line["delivered"] > 0
        assert line["cost_per_1000"] > 0
    assert sum(line["share"] for line in lines.values()) == pytest.approx(1.0)
    trained = sum(sum(share.staleness) for report in ended.steps for share in report.workers)
    assert trained == sum(sum(report.staleness_total) for report in ended.steps)
    for words in ("worker-server-0", "worker-laptop-0", "<h2>Workers</h2>"):
        assert words in ended.report, words


def test_every_trajectory_names_the_version_and_the_weights_that_made_it(ended: Ended) -> None:
    assert {record.engine for record in ended.trajectories} == ENGINES
    for record in ended.trajectories:
        assert record.weights_sha256 in {ended.manifests[version].sha256 for version in (record.min_version, record.max_version)}
    assert ended.summary["max_staleness"] <= 3


# peft says so of every configuration that it has written itself.
@pytest.mark.filterwarnings("ignore:The configuration file contains a `runtime_config` key:UserWarning")
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_what_an_engine_says_of_its_tokens_is_what_the_version_that_it_names_says(ended: Ended, engine: str, tmp_path: Path) -> None:
    """The version's own files, from the log, loaded by a third implementation."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from echo_tasks.base_models import resolve_base

    assert ended.summary["logprob_max_diff"] <= AGREEMENT
    found: dict[int, list[Trajectory]] = {}
    for record in ended.trajectories:
        if record.engine == engine and record.min_version == record.max_version:
            found.setdefault(record.min_version, []).append(record)
    assert found, f"{engine} delivered nothing under one version"
    for version in {min(found), max(found)}:
        folder = tmp_path / f"v{version}"
        with closing(ended.bus.blob_reader()) as reader:
            PublishedSource(reader).fetch(ended.manifests[version], folder)
        base = AutoModelForCausalLM.from_pretrained(Path(resolve_base(ended.base)), dtype=torch.float32)
        model: Any = PeftModel.from_pretrained(base, folder)
        for record in found[version][:32]:
            tokens = torch.tensor(record.tokens.astype("int64"))[None]
            with torch.inference_mode():
                scores = torch.log_softmax(model(tokens).logits[0, :-1], -1)
            span = record.generated[0]
            own = torch.gather(scores, 1, tokens[0, 1:, None])[span.start - 1 : span.end - 1, 0]
            assert abs(own.numpy() - record.logprob_values).max() <= AGREEMENT, version
