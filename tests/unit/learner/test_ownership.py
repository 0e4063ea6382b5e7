"""Two learners and one namespace: who may start, who is fenced, and that nothing is trained or published twice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.clock import SystemClock
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, SessionClaim
from echo_schemas.topics import PROGRESS, STEPS
from tests.unit.learner.crash_point import Crash, calls_of
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, Running, assert_books, fill

ALIVE = "A learner is alive in this namespace"
_OLD_MS = 60_000


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
    monkeypatch.setattr("echo_learner.session._SILENCE_S", 20.0)
    with waiting_learner(pipeline), pytest.raises(UserError, match=ALIVE):
        pipeline.train(NumpyTrainer("second"), steps=1)


def test_a_learner_that_fell_silent_is_followed_after_a_watch(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.session._SILENCE_S", 0.1)
    fill(pipeline, 2)
    claim = dead_learner(pipeline)
    silence(pipeline, claim, age_ms=1_000)
    pipeline.train(NumpyTrainer("second"), steps=2)
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert_books(pipeline)


def test_an_old_heartbeat_needs_no_watch(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_bus.view.CompactedView.wait_for", lambda *_, **__: pytest.fail("it watched for a newer heartbeat"))
    fill(pipeline, 2)
    silence(pipeline, dead_learner(pipeline), age_ms=_OLD_MS)
    pipeline.train(NumpyTrainer("second"), steps=2)
    assert [report.version for report in pipeline.reports()] == [1, 2]


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
    monkeypatch.setattr("echo_learner.session._SILENCE_S", 0.1)
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
