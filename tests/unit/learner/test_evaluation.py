"""Evaluations of a learner in memory: what is asked and when, what stands on `evals`, and what a crash leaves of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_core.evaluation import evaluation_seq, held_out_seed, index_of
from echo_learner.commit.publication import PublicationThread
from echo_learner.evaluation.setup import kept_manifests, read_evaluations
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Eval, EvaluationOrder, Purpose, RolloutRequest, group_id_of
from echo_schemas.topics import CONTROL, EVALS, REQUESTS, REWARDS, TRAJECTORIES
from echo_tasks.catalogue import load_task
from tests.unit.core.records import reward, trajectory
from tests.unit.learner.crash_point import Crash
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, fill

pytestmark = pytest.mark.slow

SECTION: dict[str, Any] = {"name": "held-out", "prompts": 3, "samples": 2, "pass_at": [1, 2], "every": 2, "patience_s": 60.0}


class Crowd:
    """Workers and judges in one: answers every request of an evaluation that it is not told to leave alone. `close` it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.asked: list[RolloutRequest] = []
        self.leaves: Callable[[RolloutRequest], bool] = lambda request: False
        self.value: Callable[[RolloutRequest, int], float | None] = lambda request, member: float(member == index_of(request.seq) % 2)
        self._left: list[RolloutRequest] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="crowd")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def versions(self) -> list[int]:
        """The versions asked for, in order of their first request."""
        return list(dict.fromkeys(request.required_version for request in self.asked))

    def _work(self) -> None:
        with closing(self.pipeline.bus.reader([REQUESTS])) as reader:
            reader.start()
            while not self._closed.is_set():
                for message in reader.read(timeout_s=0.01):
                    if isinstance(message.record, RolloutRequest) and message.record.purpose is Purpose.EVAL:
                        self.asked.append(message.record)
                        if not self.leaves(message.record):
                            self.answer(message.record)

    def answer(self, request: RolloutRequest, *, attempt: str = "a", **changes: Any) -> None:
        fields = {
            "purpose": Purpose.EVAL,
            "sampling": request.sampling,
            "version": request.required_version,
            "attempt": attempt,
            "group_size": request.group_size,
        }
        members = [trajectory(request.seq, index, **{**fields, **changes}) for index in range(request.group_size)]
        for member, where in zip(members, self.pipeline.write(TRAJECTORIES, *members), strict=True):
            value = self.value(request, member.index)
            judged = reward(where, request.seq, value=value, index=member.index, attempt=attempt, group_id=member.group_id)
            self.pipeline.write(REWARDS, judged, partition=where.partition)


@pytest.fixture
def crowd(pipeline: Pipeline) -> Iterator[Crowd]:
    pipeline.options = {**pipeline.options, "eval": [SECTION]}
    made = Crowd(pipeline)
    yield made
    made.close()


def results(pipeline: Pipeline) -> list[Eval]:
    return read_evaluations(pipeline.bus)


def keys(pipeline: Pipeline) -> list[tuple[int, str]]:
    return [(result.version, result.name) for result in results(pipeline)]


def test_versions_are_evaluated_at_the_start_every_so_often_and_at_the_end(pipeline: Pipeline, crowd: Crowd) -> None:
    pipeline.options["eval"] = [{**SECTION, "every": 3}]
    fill(pipeline, 4)
    metrics = pipeline.train(NumpyTrainer(), steps=4)
    done = keys(pipeline)
    assert done[0] == (0, "held-out")
    assert done[-1] == (4, "held-out"), "the learner waits for the last"
    assert set(done) <= {(version, "held-out") for version in (0, 3, 4)}
    assert len(done) == len(set(done))
    skipped = metrics.registry.get_sample_value("echo_learner_evaluations_total", {"name": "held-out", "outcome": "superseded"}) or 0
    assert len(done) + skipped == 3, "one that gives way to a newer one is counted"
    first = results(pipeline)[0]
    assert (first.num_prompts, first.num_samples, first.num_missing) == (3, 6, 0)
    assert {each.k: each.value for each in first.pass_at} == pytest.approx({1: 0.5, 2: 1.0})
    assert first.rewards[0].mean == pytest.approx(0.5)
    assert first.weights_sha256 == "0" * 64


def test_requests_name_the_version_the_section_and_held_out_prompts(pipeline: Pipeline, crowd: Crowd) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    # Requests go to the partition with the least work, so they are read in any order.
    first, again = (
        sorted((request for request in crowd.asked if request.required_version == version), key=lambda request: request.seq)
        for version in (0, 1)
    )
    assert [request.seq for request in first] == [evaluation_seq(0, "held-out", index) for index in range(3)]
    task = load_task(pipeline.settings().task.name)
    for request in first:
        assert request.exact
        assert request.evaluation == "held-out"
        assert request.group_id == group_id_of("demo", request.seq, Purpose.EVAL)
        assert json.loads(request.entry) == task.prompt(held_out_seed(0), index_of(request.seq)).entry
    assert [request.entry for request in again] == [request.entry for request in first], "every version answers the same prompts"


def test_answers_to_an_evaluation_are_never_trained_nor_dropped(pipeline: Pipeline, crowd: Crowd) -> None:
    fill(pipeline, 2)
    trainer = NumpyTrainer()
    pipeline.train(trainer, steps=2)
    assert not pipeline.drops()
    accounts = pipeline.accounts()
    accounts.assert_each_once()
    assert len(accounts.trained) == 8
    assert all(report.batch is not None and report.batch.num_samples == 4 for report in pipeline.reports())


def test_the_learner_trains_on_while_an_evaluation_is_under_way(pipeline: Pipeline, crowd: Crowd) -> None:
    crowd.leaves = lambda request: True
    fill(pipeline, 3)
    running = pipeline.start(NumpyTrainer(), learner={"steps": 3})
    try:
        pipeline.wait_for_manifest(3)
        running.wait_until(lambda: len(crowd.asked) == 3, "the first evaluation is asked")
        assert keys(pipeline) == []
        for request in list(crowd.asked):
            crowd.leaves = lambda request: False
            crowd.answer(request)
        running.join()
    finally:
        running.end()
    assert keys(pipeline) == [(0, "held-out"), (3, "held-out")], "version 2 gave way to version 3"


def test_a_learner_that_is_never_idle_publishes_results_with_its_steps(
    pipeline: Pipeline, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublicationThread, "is_busy", property(lambda self: True))
    pipeline.options["eval"] = [{**SECTION, "every": 0}]
    running = pipeline.start(NumpyTrainer(), learner={"steps": 0})
    try:
        running.wait_until(lambda: running.value("echo_learner_evaluations_total", name="held-out", outcome="done") == 1, "an evaluation")
        assert keys(pipeline) == []
        fill(pipeline, 3)
        pipeline.wait_for(EVALS, Eval, lambda result: result.version == 0, "its result")
    finally:
        running.end()


def test_missing_prompts_are_asked_once_more_and_then_left_out(pipeline: Pipeline, crowd: Crowd) -> None:
    pipeline.options["eval"] = [{**SECTION, "patience_s": 0.2, "every": 0, "at_end": False}]
    crowd.leaves = lambda request: index_of(request.seq) == 0 or (index_of(request.seq) == 1 and not request.resends)
    fill(pipeline, 1)
    running = pipeline.start(NumpyTrainer(), learner={"steps": 1})
    try:
        running.join()
    finally:
        running.end()
    (result,) = results(pipeline)
    assert (result.num_prompts, result.num_missing) == (2, 1)
    assert sorted(index_of(request.seq) for request in crowd.asked if request.resends) == [0, 1]


def test_an_evaluation_that_nobody_answers_is_given_up_and_the_learner_ends(pipeline: Pipeline, crowd: Crowd) -> None:
    pipeline.options["eval"] = [{**SECTION, "patience_s": 0.1, "at_start": False}]
    crowd.leaves = lambda request: True
    fill(pipeline, 1)
    metrics = pipeline.train(NumpyTrainer(), steps=1)
    assert keys(pipeline) == []
    assert metrics.registry.get_sample_value("echo_learner_evaluations_total", {"name": "held-out", "outcome": "unanswered"}) == 1


def test_a_sample_that_no_reward_can_judge_leaves_its_prompt_out(pipeline: Pipeline, crowd: Crowd) -> None:
    crowd.value = lambda request, member: None if index_of(request.seq) == 2 and member == 0 else 1.0
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    assert {(result.num_prompts, result.num_missing) for result in results(pipeline)} == {(2, 1)}


def test_an_interrupted_evaluation_is_finished_by_the_next_session_from_what_was_answered(pipeline: Pipeline, crowd: Crowd) -> None:
    crowd.leaves = lambda request: index_of(request.seq) == 1
    fill(pipeline, 1)
    running = pipeline.start(NumpyTrainer(), learner={"steps": 1})
    running.wait_until(lambda: len(crowd.asked) == 3, "version 0 is asked")
    pipeline.wait_for_manifest(1)
    running.stop()
    assert keys(pipeline) == []
    crowd.leaves = lambda request: False
    pipeline.train(NumpyTrainer(), steps=1)
    assert keys(pipeline) == [(0, "held-out"), (1, "held-out")]
    assert crowd.versions() == [0, 1]


def test_what_stands_on_the_log_is_not_evaluated_again(pipeline: Pipeline, crowd: Crowd) -> None:
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2)
    asked = len(crowd.asked)
    pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    assert len(crowd.asked) == asked
    assert keys(pipeline) == sorted(set(keys(pipeline)))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_crash_at_a_commit_leaves_each_result_once(pipeline: Pipeline, crowd: Crowd, number: int) -> None:
    fill(pipeline, 2)
    pipeline.crash_at(number, lambda operation: operation == "commit_transaction")
    with suppress(Crash):
        pipeline.train(NumpyTrainer(), steps=2)
    pipeline.restart()
    pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    assert len(keys(pipeline)) == len(set(keys(pipeline)))
    assert {(0, "held-out"), (2, "held-out")} <= set(keys(pipeline))


def test_an_order_is_obeyed_once_for_any_version_that_is_kept(pipeline: Pipeline, crowd: Crowd) -> None:
    pipeline.options["eval"] = []
    fill(pipeline, 3)
    running = pipeline.start(NumpyTrainer(), learner={"steps": 0})
    try:
        pipeline.wait_for_manifest(3)
        assert sorted(kept_manifests(pipeline.bus, "demo")) == [0, 1, 2, 3]
        for epoch in (1, 2):
            pipeline.write(CONTROL, _order(1, '{"name": "ordered", "prompts": 2}', epoch=epoch))
        running.wait_until(lambda: keys(pipeline) == [(1, "ordered")], "the order is obeyed")
        pipeline.write(CONTROL, _order(2, '{"name": "ordered", "prompts": 1}'), _order(2, '{"task": "no-such-task"}'))
        pipeline.write(CONTROL, _order(3, '{"name": "ordered", "prompts": 2}'))
        running.wait_until(lambda: (3, "ordered") in keys(pipeline), "an order after one that cannot be read")
    finally:
        running.stop()
    assert keys(pipeline) == [(1, "ordered"), (3, "ordered")]
    assert {request.evaluation for request in crowd.asked} == {"ordered"}


def _order(version: int, section: str, *, epoch: int = 1) -> Control:
    order = EvaluationOrder(version=version, name="ordered", section=section)
    return Control(run_id="demo", epoch=epoch, evaluation=order, issued_by="test", time_ms=1)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"task": "revers-digits"}, r"\[\[eval\]\] 'held-out': There is no task 'revers-digits'"),
        ({"rewards": ["exactt"]}, r"\[\[eval\]\] 'held-out': There is no reward 'exactt'"),
    ],
)
def test_an_unknown_task_or_reward_ends_the_learner_before_it_trains(pipeline: Pipeline, section: dict[str, Any], message: str) -> None:
    pipeline.options["eval"] = [{**SECTION, **section}]
    fill(pipeline, 1)
    with pytest.raises(UserError, match=message):
        pipeline.train(NumpyTrainer(), steps=1)
    assert not pipeline.reports()
