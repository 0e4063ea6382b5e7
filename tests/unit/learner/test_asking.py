"""A sequential learner from its requests to its reports, in memory: right, wrong, missing, late and repeated answers; restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_core.groups import SeqState
from echo_learner.intake import Intake
from echo_learner.sequential import replies
from echo_schemas.errors import UserError
from echo_schemas.records import DropReason, Purpose, ReplyOutcome, RolloutRequest
from echo_schemas.topics import REQUESTS
from tests.unit.learner.answerer import Answerer, Asked
from tests.unit.learner.crash_point import Crash
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books

pytestmark = pytest.mark.slow

SEQUENTIAL: dict[str, Any] = {"run": {"mode": "sequential"}}


@pytest.fixture(autouse=True)
def _reading_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.sequential.replies._READ_S", 0.003)


def sequential(**sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a sequential run, with `sections` on top."""
    return {**SEQUENTIAL, **sections}


def batch_seqs(pipeline: Pipeline) -> list[list[int]]:
    """The seqs of each step."""
    found = []
    for report in pipeline.reports():
        assert report.batch is not None
        found.append(sorted(set(np.frombuffer(report.batch.seqs, np.int64).tolist())))
    return found


def total(pipeline: Pipeline, metric: str) -> float:
    return sum(report.metrics[metric] for report in pipeline.reports())


def reasons(pipeline: Pipeline) -> dict[int, DropReason]:
    """Of the seqs that were dropped."""
    return {drop.seq: drop.why for drop in pipeline.drops() if drop.what is None}


def test_each_step_asks_for_its_batch_under_its_version_and_staleness_is_0(pipeline: Pipeline) -> None:
    with Answerer(pipeline) as answerer:
        pipeline.train(NumpyTrainer(), steps=3, **sequential(rollout={"probe_size": 1}))
    train = [request for request in answerer.seen if request.purpose is Purpose.TRAIN]
    assert sorted(request.seq for request in train) == list(range(6))
    assert {(request.seq // 2, request.required_version, request.learner_version, request.exact) for request in train} == {
        (version, version, version, True) for version in range(3)
    }
    # Nobody knows how long an answer takes before there was one.
    assert {request.deadline_ms is not None for request in train if request.required_version == 0} == {False}
    assert all(request.deadline_ms is not None and request.deadline_ms > request.issued_ms for request in train if request.seq > 1)
    assert [report.staleness_total for report in pipeline.reports()] == [(4,), (4,), (4,)]
    assert batch_seqs(pipeline) == [[0, 1], [2, 3], [4, 5]]
    assert total(pipeline, "requests_sent") == 6
    assert total(pipeline, "requests_resent") == total(pipeline, "replies_refused") == 0
    probes = [request for request in answerer.seen if request.purpose is Purpose.PROBE]
    assert {(request.seq, request.required_version, request.exact) for request in probes} == {(v, v, True) for v in range(3)}
    assert_books(pipeline)


def test_how_long_an_answer_took_is_known_of_a_batch_that_is_there_before_anybody_looked(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Intake, "states", lambda _self, seqs: dict.fromkeys(seqs, SeqState.MISSING))
    with Answerer(pipeline) as answerer:
        pipeline.train(NumpyTrainer(), steps=2, **SEQUENTIAL)
    first = {request.seq: request.deadline_ms is not None for request in answerer.seen if request.purpose is Purpose.TRAIN}
    assert first == {0: False, 1: False, 2: True, 3: True}


@pytest.mark.parametrize("outcome", [ReplyOutcome.FAILED, ReplyOutcome.NOT_READY, ReplyOutcome.EXPIRED])
def test_what_could_not_be_answered_is_asked_again_under_the_same_seq(pipeline: Pipeline, outcome: ReplyOutcome) -> None:
    def behave(asked: Asked) -> None:
        if asked.request.seq == 1 and asked.number < 3:
            asked.reply([], outcome=outcome, error="no")
        else:
            asked.answer()

    with Answerer(pipeline, behave) as answerer:
        pipeline.train(NumpyTrainer(), steps=2, **SEQUENTIAL)
    assert batch_seqs(pipeline) == [[0, 1], [2, 3]]
    again = [request for request in answerer.seen if request.seq == 1]
    assert [request.resends for request in again] == [0, 1, 2]
    assert len({request.correlation for request in again}) == 3
    assert total(pipeline, "requests_resent") == total(pipeline, "replies_unfulfilled") == 2
    assert not pipeline.drops()


def test_a_seq_that_nobody_can_answer_is_dropped_and_another_takes_its_place(pipeline: Pipeline) -> None:
    def behave(asked: Asked) -> None:
        if asked.request.seq == 0:
            asked.reply([], error="It is too long.")
        else:
            asked.answer()

    with Answerer(pipeline, behave) as answerer:
        pipeline.train(NumpyTrainer(), steps=2, **sequential(rollout={"resends": 1}))
    assert answerer.seqs().count(0) == 2
    assert batch_seqs(pipeline) == [[1, 2], [3, 4]]
    (drop,) = pipeline.drops()
    assert (drop.seq, drop.why, drop.detail) == (0, DropReason.FAILED, "Sent 2 times. w0: It is too long.")


def test_workers_that_fail_at_everything_end_the_run_with_their_reason(pipeline: Pipeline) -> None:
    def behave(asked: Asked) -> None:
        asked.reply([], error="The engine is on fire.")

    with Answerer(pipeline, behave), pytest.raises(UserError, match=r"No batch of version 0 can be filled.*The engine is on fire"):
        pipeline.train(NumpyTrainer(), steps=2, **sequential(rollout={"resends": 0}))


def test_silence_for_longer_than_answers_take_is_asked_again(pipeline: Pipeline) -> None:
    def behave(asked: Asked) -> None:
        if asked.request.seq != 1 or asked.number > 1:
            asked.answer()

    with Answerer(pipeline, behave) as answerer:
        pipeline.train(NumpyTrainer(), steps=1, **sequential(rollout={"request_timeout_s": 0.5}))
    assert answerer.seqs().count(1) == 2
    assert batch_seqs(pipeline) == [[0, 1]]


def test_a_worker_that_dies_before_its_receipt_costs_nothing(pipeline: Pipeline) -> None:
    def behave(asked: Asked) -> None:
        asked.publish()

    with Answerer(pipeline, behave) as answerer:
        pipeline.train(NumpyTrainer(), steps=2, **SEQUENTIAL)
    assert sorted(answerer.seqs()) == [0, 1, 2, 3]
    assert batch_seqs(pipeline) == [[0, 1], [2, 3]]
    assert total(pipeline, "replies_accepted") == 0


def test_two_attempts_train_once_and_a_second_answer_is_counted(pipeline: Pipeline) -> None:
    def behave(asked: Asked) -> None:
        if asked.request.seq == 0:
            places = asked.publish(attempt="first")
            asked.publish(attempt="second")
            asked.reply(places)
            asked.reply(places)
            asked.reply(places, correlation="nobody's")
        else:
            asked.answer()

    with Answerer(pipeline, behave):
        pipeline.train(NumpyTrainer(), steps=3, **SEQUENTIAL)
    assert batch_seqs(pipeline) == [[0, 1], [2, 3], [4, 5]]
    assert total(pipeline, "replies_duplicate") == 1
    assert total(pipeline, "replies_unknown") == 1
    assert_books(pipeline)


def held_back(pipeline: Pipeline, faulty: Callable[[Asked], None]) -> list[list[int]]:
    """A run of two steps whose seq 0 gets a faulty answer before anything else is answered; what was trained."""
    waiting: list[Asked] = []
    convicted: list[Asked] = []

    def behave(asked: Asked) -> None:
        if asked.request.seq == 0:
            faulty(asked)
            convicted.append(asked)
        else:
            waiting.append(asked)
        while convicted and waiting:
            waiting.pop().answer()

    with Answerer(pipeline, behave):
        pipeline.train(NumpyTrainer(), steps=2, **SEQUENTIAL)
    return batch_seqs(pipeline)


@pytest.mark.parametrize(
    ("changes", "why", "said"),
    [
        ({"version": 7}, DropReason.WRONG_VERSION, "w0 answered under version 7"),
        ({"weights_sha256": "0" * 64}, DropReason.WRONG_VERSION, "(000000000000); asked for was 0"),
    ],
)
def test_a_receipt_of_other_weights_convicts_its_group(pipeline: Pipeline, changes: dict[str, Any], why: DropReason, said: str) -> None:
    # The receipt comes first: whoever lies is not waited for.
    trained = held_back(pipeline, lambda asked: asked.reply(asked.pipeline.write_group(99, run_id="other"), **changes))
    assert trained == [[1, 2], [3, 4]]
    (drop,) = pipeline.drops()
    assert (drop.seq, drop.why) == (0, why)
    assert said in str(drop.detail)
    assert total(pipeline, "replies_refused") == 1


def test_a_receipt_with_wrong_counts_convicts_its_group(pipeline: Pipeline) -> None:
    trained = held_back(pipeline, lambda asked: asked.reply(asked.pipeline.write_group(99, run_id="other")[:1]))
    assert trained == [[1, 2], [3, 4]]
    assert reasons(pipeline) == {0: DropReason.INCOMPLETE}
    assert "names 1 trajectories" in str(pipeline.drops()[0].detail)


def test_trajectories_of_other_weights_are_dropped_whatever_their_receipt_says(pipeline: Pipeline) -> None:
    trained = held_back(pipeline, lambda asked: asked.reply(asked.publish(sha256="f" * 64)))
    assert trained == [[1, 2], [3, 4]]
    assert reasons(pipeline) == {0: DropReason.WRONG_VERSION}


def test_trajectories_of_another_version_are_dropped_and_replaced(pipeline: Pipeline) -> None:
    def faulty(asked: Asked) -> None:
        places = pipeline.write_group(0, version=5, weights_sha256=asked.sha256)
        asked.reply(places)

    assert held_back(pipeline, faulty) == [[1, 2], [3, 4]]
    assert reasons(pipeline) == {0: DropReason.NOT_THIS_PAST}


def test_a_learner_that_starts_again_waits_for_what_is_on_its_way(pipeline: Pipeline) -> None:
    seen: list[Asked] = []
    with Answerer(pipeline, seen.append):
        first = pipeline.start(NumpyTrainer(), **sequential(learner={"steps": 2}))
        first.wait_until(lambda: len(seen) == 2, "both requests to be sent")
        first.stop()
    seen[0].answer()
    with Answerer(pipeline, lambda asked: asked.answer() if asked.request.required_version else None) as second:
        resumed = pipeline.start(NumpyTrainer(), takeover=True, **sequential(learner={"steps": 2}))
        resumed.wait_until(lambda: resumed.value("echo_learner_groups_ready") == 1, "the first answer to be found")
        seen[1].answer()
        resumed.join()
    assert sorted(request.seq for request in second.seen) == [0, 1, 2, 3]
    assert batch_seqs(pipeline) == [[0, 1], [2, 3]]
    assert_books(pipeline)


def test_a_learner_that_dies_at_its_commits_trains_every_seq_once(pipeline: Pipeline) -> None:
    # After version 0, before a step is public, and before what was left of it is.
    for number in (3, 2, 3):
        # Of the clients here only the learner's commits: what the workers' hand does must not count.
        pipeline.crash_at(number, lambda operation: operation == "commit_transaction")
        with Answerer(pipeline), pytest.raises(Crash):
            pipeline.train(NumpyTrainer(), steps=3, takeover=True, **SEQUENTIAL)
        pipeline.restart()
    with Answerer(pipeline):
        pipeline.train(NumpyTrainer(), steps=3, takeover=True, **SEQUENTIAL)
    trained = [seq for seqs in batch_seqs(pipeline) for seq in seqs]
    assert len(trained) == len(set(trained)) == 6
    assert [report.staleness_total for report in pipeline.reports()] == [(4,)] * 3
    pipeline.accounts().assert_each_once()


def test_the_learner_reads_a_partition_of_its_own(pipeline: Pipeline) -> None:
    with Answerer(pipeline):
        pipeline.train(NumpyTrainer(), steps=1, **SEQUENTIAL)
    assert replies.PARTITION == 0
    assert {request.exact for request in pipeline.read(REQUESTS, RolloutRequest)} == {True}
