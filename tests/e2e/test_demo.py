"""The packaged runs, short: Kafka, vLLM, Faust and DeepSpeed as processes, and then what they left on the log, record by record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pytest

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_replay.audit import audit_run
from echo_replay.verdicts import Verdict
from echo_runtime.opening import open_bus
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.naming import Namespace
from echo_schemas.records import (
    Coordinates,
    Drop,
    Eval,
    Purpose,
    Record,
    ReplyOutcome,
    Reward,
    RolloutReply,
    RolloutRequest,
    StepReport,
    Trajectory,
    WeightManifest,
    WorkerStatus,
)
from echo_schemas.topics import DROPS, EVALS, REPLIES, REQUESTS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS, Topic
from echo_settings import load_settings
from tests.installed import missing
from tests.thorough import IS_THOROUGH

_MISSING = missing("vllm", "faust", "deepspeed")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]

STEPS_TRAINED = 6 if IS_THOROUGH else 3
DEMOS = {"reverse": ["reverse"], "sokoban-sequential": ["--task", "sokoban", "--mode", "sequential"]}
"""By a name of their own: what somebody types. Another demo is that of test_demo_goes_on, unless the run is thorough."""
if IS_THOROUGH:
    DEMOS |= {
        "sort": ["sort"],
        "reverse-sequential": ["reverse", "--mode", "sequential"],
        "sokoban": ["--task", "sokoban"],
        "knights-knaves": ["--task", "knights-knaves"],
    }
# The others sample with transformers, which is there in a third of vLLM's time, unless the run is thorough.
ON_VLLM = set(DEMOS) if IS_THOROUGH else {"reverse"}
WAIT_S = 1_200.0
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Ended:
    """A demo that has ended: what it printed, wrote and published. `lines`: the logs of all processes. `step_size`: samples of a step.
    `budget`: the staleness allowed."""

    output: str
    summary: dict[str, Any]
    report: str
    lines: list[dict[str, Any]]
    bus: Bus
    step_size: int
    budget: int
    is_sequential: bool

    def read(self, topic: Topic, kind: type[R]) -> list[tuple[Coordinates, R]]:
        """The run's committed records of one kind with their coordinates, in log order."""
        with closing(self.bus.reader([topic])) as reader:
            reader.start()
            messages = [message for batch in reader.read_to_end(Deadline.after(60)) for message in batch]
        return [(message.coordinates, message.record) for message in messages if isinstance(message.record, kind)]

    @cached_property
    def steps(self) -> list[StepReport]:
        return [report for _, report in self.read(STEPS, StepReport)]

    @cached_property
    def samples(self) -> dict[Coordinates, Trajectory]:
        return dict(self.read(TRAJECTORIES, Trajectory))

    @cached_property
    def trained(self) -> list[list[Coordinates]]:
        """The coordinates in each step's batch."""
        return [
            [
                Coordinates(partition=int(partition), offset=int(offset))
                for partition, offset in zip(
                    np.frombuffer(report.batch.partitions, TOKEN_DTYPE), np.frombuffer(report.batch.offsets, OFFSET_DTYPE), strict=True
                )
            ]
            for report in self.steps
            if report.batch is not None
        ]


@pytest.fixture(scope="module", params=list(DEMOS))
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kafka_bootstrap: str) -> Ended:
    """`echoswarm demo NAME` with a few steps, in a namespace of its own, as somebody would type it."""
    folder = tmp_path_factory.mktemp(request.param)
    namespace = Namespace(f"e2e.{folder.name.replace('_', '-')}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
        "ECHO_KAFKA__BOOTSTRAP": kafka_bootstrap,
        "ECHO_KAFKA__NAMESPACE": namespace.name,
        "ECHO_LOGS__FORMAT": "json",
        "ECHO_LOGS__LEVEL": "debug",
        "ECHO_ROLLOUT__ENGINE": "vllm" if request.param in ON_VLLM else "transformers",
    }
    is_sequential = "sequential" in DEMOS[request.param]
    command = [sys.executable, "-m", "echo_ops.cli", "demo", *DEMOS[request.param], "--plain", "--steps", str(STEPS_TRAINED)]
    found = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    (run,) = (folder / "runs").iterdir()
    logs = "".join(f"\n--- {log.name}\n{log.read_text(encoding='utf-8')[-3_000:]}" for log in sorted(run.glob("logs/*.log")))
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{logs}"
    settings = load_settings(
        run / "run.toml", {**environ, "ECHO_RUN__NAME": run.name, "ECHO_RUN__MODE": "sequential" if is_sequential else "asynchronous"}
    )
    return Ended(
        output=found.stdout,
        summary=json.loads((run / "summary.json").read_text(encoding="utf-8")),
        report=(run / "report.html").read_text(encoding="utf-8"),
        lines=[
            json.loads(line)
            for log in run.glob("logs/*.log")
            for line in log.read_text(encoding="utf-8").splitlines()
            if line.startswith("{")
        ],
        bus=open_bus(settings, "test"),
        step_size=settings.learner.groups_per_step * settings.rollout.group_size,
        budget=settings.budget,
        is_sequential=is_sequential,
    )


def test_it_trains_its_steps_and_says_so(ended: Ended) -> None:
    summary = ended.summary
    assert (summary["outcome"], summary["steps"]) == ("finished", STEPS_TRAINED)
    assert summary["trajectories_trained"] == STEPS_TRAINED * ended.step_size
    assert summary["trajectories_trained"] <= summary["trajectories_published"]
    assert 0.05 < summary["reward_first"] < 0.7, "the demo's base model is meant to be right sometimes, and wrong often"
    assert 0 <= summary["max_staleness"] <= ended.budget
    assert 0 < summary["t_bcast_p50_s"] < summary["wall_seconds"]
    assert f"step {STEPS_TRAINED}/{STEPS_TRAINED}" in ended.output
    assert f"finished: {STEPS_TRAINED} steps" in ended.output
    assert "report.html" in " ".join(ended.output.split())


def test_the_logs_tell_what_became_of_each_trained_group(ended: Ended) -> None:
    told: dict[str, dict[str, dict[str, Any]]] = {}
    for line in ended.lines:
        if "group" in line and line["group"] in line["message"]:
            told.setdefault(line["group"], {})[line["logger"]] = line
    asks = "echo_learner.sequential.asking" if ended.is_sequential else "echo_rollout.feeder"
    for version, batch in enumerate(ended.trained, start=1):
        for group in {ended.samples[where].group_id for where in batch}:
            lines = told[group]
            assert {asks, "echo_rollout.group_work", "echo_streams.processing", "echo_learner.learner"} <= lines.keys()
            assert {line["run"] for line in lines.values()} == {ended.summary["run"]}
            assert lines["echo_rollout.group_work"]["role"] == "worker"
            assert lines["echo_rollout.group_work"]["version"] < version == lines["echo_learner.learner"]["version"]
            assert "published" in lines["echo_rollout.group_work"]["message"]


def test_learner_and_worker_agree_on_every_probed_version(ended: Ended) -> None:
    assert ended.summary["logprob_samples"] >= 4
    assert ended.summary["logprob_max_diff"] <= 1e-4
    probed = {sample.min_version for sample in ended.samples.values() if sample.purpose is Purpose.PROBE}
    assert 0 in probed
    assert max(probed) > 0


def test_every_sample_is_trained_once_from_one_attempt_within_the_budget(ended: Ended) -> None:
    everything = [where for batch in ended.trained for where in batch]
    assert len(everything) == len(set(everything)) == STEPS_TRAINED * ended.step_size
    attempts: dict[int, set[str]] = {}
    for version, batch in enumerate(ended.trained):
        for where in batch:
            sample = ended.samples[where]
            assert sample.purpose is Purpose.TRAIN
            assert 0 <= version - sample.min_version <= ended.budget
            attempts.setdefault(sample.seq, set()).add(sample.attempt)
    assert all(len(found) == 1 for found in attempts.values())
    dropped = {drop.seq for _, drop in ended.read(DROPS, Drop) if drop.what is None}
    assert not dropped & set(attempts)


def test_every_trained_sample_was_scored_where_it_lies(ended: Ended) -> None:
    values: dict[Coordinates, set[float | None]] = {}
    for _, reward in ended.read(REWARDS, Reward):
        values.setdefault(reward.of, set()).add(reward.value)
    # At least once, and whatever comes again says the same.
    assert all(len(values[where]) == 1 for batch in ended.trained for where in batch)


def test_a_sequential_learner_asks_for_exactly_its_batches_and_is_answered_each_time(ended: Ended) -> None:
    asked = [request for _, request in ended.read(REQUESTS, RolloutRequest) if request.purpose is Purpose.TRAIN]
    assert asked
    if not ended.is_sequential:
        assert not any(request.exact or request.correlation for request in asked)
        return
    assert Counter(request.required_version for request in asked) == dict.fromkeys(range(STEPS_TRAINED), len(asked) // STEPS_TRAINED)
    assert sum(request.group_size for request in asked) == STEPS_TRAINED * ended.step_size
    receipts = {reply.correlation: reply for _, reply in ended.read(REPLIES, RolloutReply)}
    shas = {manifest.version: manifest.sha256 for _, manifest in ended.read(WEIGHTS, WeightManifest)}
    for request in asked:
        assert request.exact
        receipt = receipts[request.correlation or ""]
        assert (receipt.outcome, receipt.version) == (ReplyOutcome.DONE, request.required_version)
        assert receipt.weights_sha256 == shas[request.required_version]
        assert [ended.samples[where].group_id for where in receipt.where] == [request.group_id] * request.group_size
    assert {report.staleness_total for report in ended.steps} == {(ended.step_size,)}


def test_versions_form_one_line_and_reach_the_worker(ended: Ended) -> None:
    assert [report.version for report in ended.steps] == list(range(1, STEPS_TRAINED + 1))
    manifests = {manifest.version: manifest for _, manifest in ended.read(WEIGHTS, WeightManifest)}
    assert sorted(manifests) == list(range(STEPS_TRAINED + 1))
    assert all(manifests[version].parent_sha256 == manifests[version - 1].sha256 for version in range(1, STEPS_TRAINED + 1))
    assert {sample.min_version for sample in ended.samples.values()} <= set(manifests)
    for sample in ended.samples.values():
        assert sample.weights_sha256 in {manifests[span.version].sha256 for span in sample.version_spans}
    last = {status.worker_id: status for _, status in ended.read(WORKERS, WorkerStatus)}
    assert last
    for status in last.values():
        assert status.installed_version is not None
        assert status.weights_sha256 == manifests[status.installed_version].sha256


def test_the_first_and_the_last_version_answer_held_out_prompts(ended: Ended) -> None:
    shas = {manifest.version: manifest.sha256 for _, manifest in ended.read(WEIGHTS, WeightManifest)}
    results = {result.version: result for _, result in ended.read(EVALS, Eval)}
    assert sorted(results) == [0, STEPS_TRAINED]
    for version, result in results.items():
        assert (result.num_prompts, result.num_missing) == (128, 0)
        assert result.weights_sha256 == shas[version]
    assert [each["version"] for each in ended.summary["evaluations"]] == [0, STEPS_TRAINED]
    answers = [sample for sample in ended.samples.values() if sample.purpose is Purpose.EVAL]
    assert {sample.min_version for sample in answers} == {0, STEPS_TRAINED}


def test_the_audit_proves_every_promise(ended: Ended) -> None:
    report = audit_run(ended.bus, ended.summary["run"])
    assert {finding.promise: (finding.examples, finding.gaps) for finding in report.findings if finding.verdict is not Verdict.PROVED} == {}
    assert report.counts["trained"] == STEPS_TRAINED * ended.step_size


def test_the_report_is_one_file(ended: Ended) -> None:
    assert "</html>" in ended.report
    assert "http://" not in ended.report.replace("http://www.w3.org", "")
    assert "https://" not in ended.report
    assert ended.summary["run"] in ended.report
