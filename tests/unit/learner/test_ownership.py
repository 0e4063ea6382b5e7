"""Two learners and one namespace: who may start, who is fenced, and that nothing is trained or published twice."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.bus import Bus
from echo_bus.clock import ManualClock, SystemClock
from echo_bus.errors import DeadlineExceeded, DeliveryFailed, TransactionAborted, TransportError
from echo_learner.commit.session import is_alive
from echo_learner.run import run_learner
from echo_memory import MemoryCluster
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, Run, SessionClaim, StepPolicy
from echo_schemas.topics import PROGRESS, RUNS, STEPS
from tests.unit.learner.crash_point import Crash, calls_of
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import NumberCodec, Pipeline, Running, assert_books, fill

pytestmark = pytest.mark.slow

ALIVE = "A learner is alive in this namespace"


@contextmanager
def waiting_learner(pipeline: Pipeline, trainer: NumpyTrainer | None = None) -> Iterator[Running]:
    """A learner that has version 0 public and waits for groups."""
    running = pipeline.start(trainer or NumpyTrainer("first"))
    try:
        pipeline.wait_for(STEPS, SessionClaim, lambda claim: claim.tip_version == 0, "the first claim")
        pipeline.wait_for_manifest(0)
        yield running
    finally:
        running.end()


def silence(pipeline: Pipeline, claim: SessionClaim, *, age_ms: int) -> None:
    """The claim's session has written its last heartbeat so long ago."""
    last = pipeline.read(PROGRESS, Progress)[-1]
    assert last.session == claim.session
    pipeline.write(PROGRESS, replace(last, time_ms=SystemClock().time_ms() - age_ms))


def dead_learner(pipeline: Pipeline) -> SessionClaim:
    """A learner that died while it published version 1."""
    pipeline.crash_at(10, calls_of("publication"))
    with pytest.raises(Crash):
        pipeline.train(NumpyTrainer("first"), steps=2)
    pipeline.restart()
    return pipeline.read(STEPS, SessionClaim)[-1]


def test_a_second_learner_refuses_while_the_first_heartbeats(pipeline: Pipeline) -> None:
    with waiting_learner(pipeline):
        (claim,) = pipeline.read(STEPS, SessionClaim)
        with pytest.raises(UserError, match=f"{ALIVE}: run 'demo', process {os.getpid()} on .*, session {claim.session}") as refused:
            pipeline.train(NumpyTrainer("second"), steps=1)
        assert "--takeover" in (refused.value.hint or "")
        assert pipeline.read(STEPS, SessionClaim) == [claim]


def test_a_learner_of_another_run_in_the_namespace_counts_too(pipeline: Pipeline) -> None:
    with waiting_learner(pipeline), pytest.raises(UserError, match=f"{ALIVE}: run 'demo'"):
        pipeline.train(NumpyTrainer("other"), steps=1, run={"name": "other"})


def test_one_newer_heartbeat_is_enough_to_refuse(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 20.0)
    with waiting_learner(pipeline), pytest.raises(UserError, match=ALIVE):
        pipeline.train(NumpyTrainer("second"), steps=1)


def test_a_learner_that_fell_silent_is_followed_after_a_watch(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 0.1)
    fill(pipeline, 2)
    claim = dead_learner(pipeline)
    silence(pipeline, claim, age_ms=1_000)
    pipeline.train(NumpyTrainer("second"), steps=2)
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert_books(pipeline)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[NumpyTrainer]:
    """Stands in for DeepSpeed in `run_learner`; the trainers that were opened."""
    trainers: list[NumpyTrainer] = []

    def open_trainer(config: object, num_ranks: int) -> NumpyTrainer:
        trainers.append(NumpyTrainer("opened"))
        return trainers[-1]

    monkeypatch.setattr("echo_learner.run.resolve_base", lambda base: base)
    monkeypatch.setattr("echo_learner.run.check_positions", lambda base, max_length: None)
    monkeypatch.setattr("echo_learner.run.PromptCodec", lambda base: NumberCodec())
    monkeypatch.setattr("echo_learner.run.open_trainer", open_trainer)
    return trainers


def test_a_second_learner_is_refused_before_its_trainer_is_up(pipeline: Pipeline, opened: list[NumpyTrainer]) -> None:
    with waiting_learner(pipeline), pytest.raises(UserError, match=ALIVE):
        run_learner(pipeline.process())
    assert opened == []


def test_other_values_are_refused_before_the_trainer_is_up(pipeline: Pipeline, opened: list[NumpyTrainer]) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    with pytest.raises(UserError, match="was started with other values"):
        run_learner(pipeline.process(learner={"lr": 0.5}), takeover=True)
    assert opened == []


def test_a_silent_session_is_listened_for_once(pipeline: Pipeline, opened: list[NumpyTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 0.1)
    watched: list[str] = []

    def listen(bus: Bus, claim: SessionClaim) -> bool:
        watched.append(claim.session)
        return is_alive(bus, claim)

    monkeypatch.setattr("echo_learner.commit.session.is_alive", listen)
    fill(pipeline, 2)
    claim = dead_learner(pipeline)
    run_learner(pipeline.process(learner={"steps": 2}))
    assert (watched, len(opened)) == ([claim.session], 1)
    assert [report.version for report in pipeline.reports()] == [1, 2]


def test_a_process_that_is_known_to_be_gone_needs_no_watch(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pipeline, 2)
    claim = dead_learner(pipeline)
    ended = subprocess.Popen(["true"])
    ended.wait()
    pipeline.write(STEPS, replace(claim, pid=ended.pid))
    monkeypatch.setattr("echo_bus.reading.view.CompactedView.wait_for", lambda *_, **__: pytest.fail("it watched for a newer heartbeat"))
    pipeline.train(NumpyTrainer("second"), steps=2)
    assert [report.version for report in pipeline.reports()] == [1, 2]


@pytest.mark.parametrize("machine", ["", "another boot/pid:[4026531836]"])
def test_a_process_id_of_another_machine_proves_nothing(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 20.0)
    with waiting_learner(pipeline):
        (claim,) = pipeline.read(STEPS, SessionClaim)
        ended = subprocess.Popen(["true"])
        ended.wait()
        elsewhere = replace(claim, pid=ended.pid, machine=machine)
        assert is_alive(pipeline.bus, elsewhere)
        assert not is_alive(pipeline.bus, replace(elsewhere, machine=claim.machine))


@pytest.mark.parametrize("step_ms", [-3_600_000, 0, 3_600_000], ids=["set back", "stands still", "runs away"])
def test_heartbeats_are_judged_by_their_coming_and_not_by_the_other_clock(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 20.0)
    fill(pipeline, 2)
    claim = dead_learner(pipeline)
    last = pipeline.read(PROGRESS, Progress)[-1]
    stop = threading.Event()

    def beat() -> None:
        time_ms = last.time_ms - 24 * 3_600_000
        while not stop.wait(0.01):
            time_ms += step_ms
            pipeline.write(PROGRESS, replace(last, session=claim.session, time_ms=max(0, time_ms)))

    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(UserError, match=ALIVE):
            pipeline.train(NumpyTrainer("second"), steps=2)
    finally:
        stop.set()
        other.join()


@pytest.mark.parametrize(("ahead_s", "said"), [(-3600.0, "ours is behind"), (3600.0, "ours is ahead"), (1.0, None)])
def test_a_clock_that_is_far_off_is_said(
    tmp_path: Path, pipeline: Pipeline, caplog: pytest.LogCaptureFixture, ahead_s: float, said: str | None
) -> None:
    """The broker stamps what is appended to `steps`; the learner's clock is the system's."""
    broker = ManualClock(start_ms=SystemClock().time_ms() - int(ahead_s * 1000))
    skewed = Pipeline(tmp_path / "skewed", cluster=MemoryCluster(broker))
    timestamps = ConfigEntry("message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, skewed.namespace.topic(STEPS), incremental_configs=[timestamps])
    for future in skewed.cluster.admin().incremental_alter_configs([resource]).values():
        future.result()
    fill(skewed, 1)
    metrics = skewed.train(NumpyTrainer(), steps=1)
    assert metrics.registry.get_sample_value("echo_learner_clock_skew_seconds") == pytest.approx(-ahead_s, abs=30)
    assert ("clock and the broker's differ" in caplog.text) is (said is not None)
    assert said is None or said in caplog.text
    assert [report.version for report in skewed.reports()] == [1]


def test_a_predecessor_s_claim_is_no_successor(pipeline: Pipeline) -> None:
    """The producer dies of a time-out before our claim is in the log: the newest claim is an old one, and nobody has taken over."""
    fill(pipeline, 2)
    dead_learner(pipeline)
    commits = 0

    def before(operation: str) -> None:
        nonlocal commits
        if operation == "commit_transaction":
            commits += 1
            if commits == 1:
                pipeline.cluster.fence(pipeline.namespace.transactional_id("learner"))

    pipeline.cluster.faults.before = before
    pipeline.train(NumpyTrainer("second"), steps=2, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert len(pipeline.read(STEPS, SessionClaim)) == 2, "the one that died, and the second attempt"
    assert_books(pipeline)


def test_a_take_over_ends_the_first_at_its_next_commit(pipeline: Pipeline) -> None:
    with waiting_learner(pipeline) as first:
        second = pipeline.start(NumpyTrainer("second"), takeover=True, learner={"steps": 2})
        pipeline.wait_for(STEPS, SessionClaim, lambda claim: claim.takeover, "the second claim")
        newest = pipeline.read(STEPS, SessionClaim)[-1]
        fill(pipeline, 2)
        second.join()
        whose = re.escape(f"process {newest.pid} on {newest.host}, session {newest.session}")
        with pytest.raises(UserError, match=f"Another learner has taken this namespace over: {whose}. This one ends."):
            first.join()
    assert [(report.version, report.session) for report in pipeline.reports()] == [(1, newest.session), (2, newest.session)]
    assert [manifest.session for manifest in pipeline.manifests()][1:] == [newest.session] * 2
    assert_books(pipeline)


@pytest.mark.parametrize("error", [DeliveryFailed, DeadlineExceeded, TransactionAborted])
@pytest.mark.parametrize("is_succeeded", [True, False])
def test_a_record_that_was_given_up_names_the_successor_if_there_is_one(
    pipeline: Pipeline, error: type[TransportError], *, is_succeeded: bool
) -> None:
    def before(operation: str) -> None:
        if operation == "flush" and threading.current_thread().name.startswith("publication"):
            raise error("A record was not acknowledged.")

    with waiting_learner(pipeline) as first:
        pipeline.cluster.faults.before = before
        if is_succeeded:
            pipeline.write(STEPS, replace(pipeline.read(STEPS, SessionClaim)[-1], session="successor"))
        fill(pipeline, 1)
        expected = "Another learner has taken this namespace over: .* session successor" if is_succeeded else "was not acknowledged"
        with pytest.raises(UserError if is_succeeded else error, match=expected):
            first.join()


def test_a_learner_that_has_nothing_to_commit_finds_its_successor(pipeline: Pipeline) -> None:
    with waiting_learner(pipeline) as first:
        second = pipeline.start(NumpyTrainer("second"), takeover=True)
        with pytest.raises(UserError, match="Another learner has taken this namespace over"):
            first.join()
        fill(pipeline, 1)
        pipeline.wait_for_manifest(1)
        second.stop()
    assert len({report.session for report in pipeline.reports()}) == 1
    assert_books(pipeline)


def test_a_producer_that_dies_without_a_successor_starts_the_session_over(pipeline: Pipeline) -> None:
    trainer = NumpyTrainer()
    with waiting_learner(pipeline, trainer) as running:
        pipeline.cluster.fence(pipeline.namespace.transactional_id("learner"))
        fill(pipeline, 2)
        pipeline.wait_for_manifest(2)
        running.stop()
    first, second = pipeline.read(STEPS, SessionClaim)
    assert (first.takeover, second.takeover) == (False, True)
    assert first.session != second.session
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert pipeline.reports()[0].session == first.session, "trained and checkpointed by the first, published by the second as it was"
    assert_books(pipeline)


def test_runs_may_follow_one_another_in_a_namespace(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 0.1)
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    other = {"name": "other"}
    for seq in range(2):
        pipeline.write_group(seq, run_id="other")
    pipeline.train(NumpyTrainer(), steps=1, run=other)
    fill(pipeline, 2, start=1)
    pipeline.train(NumpyTrainer(), steps=2)
    claims = [claim for _, claim in pipeline.placed(STEPS, SessionClaim, every_run=True)]
    assert [(claim.run_id, claim.tip_version) for claim in claims] == [("demo", 0), ("other", 0), ("demo", 1)]
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert_books(pipeline)


def test_a_learner_of_another_run_is_not_taken_over(pipeline: Pipeline) -> None:
    """Its workers and reward processes would go on in the groups of the namespace."""
    with waiting_learner(pipeline) as first:
        with pytest.raises(UserError, match=f"{ALIVE}: run 'demo'") as refused:
            pipeline.train(NumpyTrainer("other"), steps=1, takeover=True, run={"name": "other"})
        assert "of the same run" in refused.value.hint
        assert len(pipeline.read(STEPS, SessionClaim)) == 1
        first.stop()


def test_of_two_learners_that_race_on_a_fresh_run_exactly_one_goes_on(pipeline: Pipeline, tmp_path: Path) -> None:
    """Each on a disk of its own. The late one has looked, and fences, but the other has claimed and trained meanwhile."""
    elsewhere = Pipeline(tmp_path / "another disk", cluster=pipeline.cluster)
    has_looked, may_fence = threading.Event(), threading.Event()

    def before(operation: str) -> None:
        if operation == "init_transactions" and not has_looked.is_set():
            has_looked.set()
            assert may_fence.wait(60), "waited for the other learner"

    fill(pipeline, 1)
    pipeline.cluster.faults.before = before
    late = elsewhere.start(NumpyTrainer("late"))
    assert has_looked.wait(60), "waited for the late learner's look"
    first = pipeline.start(NumpyTrainer("first"))
    pipeline.wait_for_manifest(1)
    may_fence.set()
    with pytest.raises(UserError, match="Another learner has taken this namespace over"):
        late.join()
    fill(pipeline, 2, start=1)
    pipeline.wait_for_manifest(2)
    first.stop()
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert_books(pipeline)


def test_only_a_learner_that_has_accepted_the_run_says_what_it_is(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    (said,) = pipeline.read(RUNS, Run)
    with pytest.raises(UserError, match="was started with other values"):
        pipeline.train(NumpyTrainer("refused"), steps=2, takeover=True, staleness={"budget": 50, "publication_period": 1})
    assert pipeline.read(RUNS, Run) == [said]


def test_a_report_says_what_governed_its_step(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    (report,) = pipeline.reports()
    assert report.policy == StepPolicy(budget=3, publication_period=1, over_budget="drop", groups_per_step=2, min_group_size=2)


def test_rewards_of_the_file_that_a_resume_does_not_take_are_said(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=1)
    assert "not in force" not in caplog.text
    pipeline.options["rewards"] = {"exact": 0.25}
    pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    assert "trained with exact = 1 (deadline 300.0 s), as it began; the file has exact = 0.25 (deadline 300.0 s)" in caplog.text
