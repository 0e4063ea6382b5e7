"""A learner that waits: for rewards, for whole groups, for the operator. What it says meanwhile, and what it does when time is up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.clock import ManualClock
from echo_schemas.columns import FLAG_DTYPE, VALUE_DTYPE
from echo_schemas.records import (
    Control,
    Coordinates,
    DropReason,
    Progress,
    RewardControl,
    RewardOutcome,
    RewardTerm,
    RunControl,
    RunState,
    StepReport,
)
from echo_schemas.topics import CONTROL, PROGRESS, STEPS, TRAJECTORIES
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, Running, assert_books, fill, sample

DEADLINE_S = 100.0
AT_ONCE_S = 0.0
OPEN, READY = "echo_learner_groups_open", "echo_learner_groups_ready"
Start = Callable[..., Running]


@pytest.fixture
def clock(pipeline: Pipeline) -> ManualClock:
    """The learner's own clock, which only the test moves. 100 s for a reward, 200 s for a group to be whole."""
    pipeline.options = {"scoring": {"deadline_s": DEADLINE_S}, "rollout": {"request_timeout_s": 2 * DEADLINE_S}}
    pipeline.clock = manual = ManualClock()
    return manual


@pytest.fixture
def start(pipeline: Pipeline) -> Iterator[Start]:
    """`start(**sections)`: a learner that is ended after the test."""
    started: list[Running] = []

    def begin(**sections: Any) -> Running:
        started.append(pipeline.start(NumpyTrainer(), **sections))
        return started[-1]

    yield begin
    for running in started:
        running.end()


def wait_while_time_passes(running: Running, clock: ManualClock, metric: str, value: float) -> float:
    """Seconds on the learner's clock until one of its metrics has the value."""
    started_s = clock.monotonic_s()

    def holds() -> bool:
        clock.advance(5.0)
        return running.value(metric) == value

    running.wait_until(holds, f"{metric} is {value:g}")
    return clock.monotonic_s() - started_s


def train_one_step(pipeline: Pipeline, running: Running) -> StepReport:
    """Drops travel with steps."""
    fill(pipeline, 1)
    report = pipeline.wait_for(STEPS, StepReport, lambda _: True, "a step")
    running.stop()
    return report


def assert_dropped(pipeline: Pipeline, running: Running, why: DropReason, records: list[Coordinates], seq: int) -> None:
    """These records and their seq, nothing else, once each, in the log and in the metrics."""
    accounts = pipeline.accounts()
    assert accounts.dropped == {where: [why.value] for where in records}
    assert accounts.seqs_dropped == {seq: [why.value]}
    for what, count in (("trajectory", len(records)), ("group", 1)):
        assert running.value("echo_learner_dropped_total", reason=why.value, what=what) == count
    assert_books(pipeline)


def test_a_group_that_never_becomes_whole_is_dropped_when_its_time_is_up(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    places = pipeline.write(TRAJECTORIES, sample(7, 0))
    running = start()
    running.wait_for_value(OPEN, 1)
    assert wait_while_time_passes(running, clock, OPEN, 0) > 2 * DEADLINE_S
    train_one_step(pipeline, running)
    assert_dropped(pipeline, running, DropReason.INCOMPLETE, places, 7)
    assert "No whole attempt within 200 s" in str(pipeline.drops()[0].detail)


@pytest.mark.parametrize(
    ("outcome", "least_s"),
    [(None, DEADLINE_S), (RewardOutcome.FAILED, DEADLINE_S), (RewardOutcome.TIMED_OUT, DEADLINE_S), (RewardOutcome.STALE, AT_ONCE_S)],
    ids=["missing", "failed", "timed out", "stale"],
)
def test_a_required_reward_that_does_not_come_costs_the_group(
    pipeline: Pipeline, clock: ManualClock, start: Start, outcome: RewardOutcome | None, least_s: float
) -> None:
    places = pipeline.write_group(7, values=(1.0, None))
    if outcome is not None:
        pipeline.write_reward(sample(7, 1), places[1], None, outcome=outcome)
    running = start()
    running.wait_for_value(OPEN, 1)
    if least_s:
        assert wait_while_time_passes(running, clock, READY, 1) > least_s
    else:
        running.wait_for_value(READY, 1)
    train_one_step(pipeline, running)
    assert_dropped(pipeline, running, DropReason.UNREWARDED, places, 7)


def test_a_sample_without_its_reward_leaves_a_group_that_may_be_smaller(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    places = pipeline.write_group(0, values=(1.0, None))
    running = start(staleness={"min_group_size": 1})
    running.wait_for_value(OPEN, 1)
    wait_while_time_passes(running, clock, READY, 1)
    pipeline.write_group(1)
    report = pipeline.wait_for(STEPS, StepReport, lambda _: True, "a step")
    running.stop()
    assert report.batch is not None
    assert report.batch.num_samples == 3
    assert pipeline.accounts().dropped == {places[1]: ["unrewarded"]}
    assert_books(pipeline)


def test_a_reward_that_comes_after_its_failure_counts(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    places = pipeline.write_group(0, values=(1.0, None))
    pipeline.write_reward(sample(0, 1), places[1], None)
    running = start()
    running.wait_for_value(OPEN, 1)
    clock.advance(DEADLINE_S / 2)
    pipeline.write_reward(sample(0, 1), places[1], 3.0)
    pipeline.write_group(1)
    report = pipeline.wait_for(STEPS, StepReport, lambda _: True, "a step")
    running.stop()
    assert report.metrics["reward_max"] == 3.0
    assert not pipeline.drops()


def test_a_default_stands_in_for_a_reward_that_does_not_come(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    terms = (RewardTerm(name="exact", weight=2.0, default=0.25, deadline_s=DEADLINE_S / 2),)
    order = RewardControl(from_version=0, terms=terms)
    pipeline.write(CONTROL, Control(run_id="demo", epoch=1, rewards=order, issued_by="test", time_ms=1))
    for seq in range(2):
        places = pipeline.write_group(seq, values=(1.0, None))
        pipeline.write_reward(sample(seq, 1), places[1], None)
    running = start()
    running.wait_for_value(OPEN, 2)
    assert wait_while_time_passes(running, clock, "echo_learner_version", 1) > DEADLINE_S / 2
    report = pipeline.wait_for(STEPS, StepReport, lambda _: True, "a step")
    running.stop()
    assert report.reward_terms == terms
    assert report.batch is not None
    (column,) = report.batch.rewards
    assert np.frombuffer(column.values, VALUE_DTYPE).tolist() == [1.0, 0.25, 1.0, 0.25]
    assert np.frombuffer(column.defaulted, FLAG_DTYPE).tolist() == [0, 1, 0, 1]
    assert {stats.name: stats.maximum for stats in report.reward_stats} == {"exact": 1.0, "total": 2.0}


def test_progress_comes_while_nothing_else_does(pipeline: Pipeline, start: Start) -> None:
    """The wire contract is one a second; a machine that pauses may stretch a gap, so some are given away."""
    running = start()
    seen: list[int] = []

    def is_third_in_time(progress: Progress) -> bool:
        seen.append(progress.time_ms)
        return sum(0 < later - earlier < 1_000 for earlier, later in itertools.pairwise(seen[1:])) == 3

    pipeline.wait_for(PROGRESS, Progress, is_third_in_time, "three heartbeats within a second of the one before")
    running.stop()


def test_a_paused_run_trains_nothing_until_it_may(pipeline: Pipeline, start: Start) -> None:
    def order(epoch: int, state: RunState) -> Control:
        return Control(run_id="demo", epoch=epoch, run=RunControl(state=state), issued_by="test", time_ms=epoch)

    pipeline.write(CONTROL, order(1, RunState.PAUSED))
    fill(pipeline, 2)
    running = start(learner={"steps": 2})
    running.wait_for_value(READY, 4)
    idle_s = running.value("echo_learner_idle_seconds_total")
    running.wait_until(lambda: running.value("echo_learner_idle_seconds_total") > idle_s + 0.05, "the learner has waited")
    assert running.value("echo_learner_version") == 0
    pipeline.write(CONTROL, order(2, RunState.RUNNING))
    running.join()
    assert [report.version for report in pipeline.reports()] == [1, 2]


def test_a_learner_that_is_told_to_stop_ends_between_steps(pipeline: Pipeline, start: Start) -> None:
    fill(pipeline, 1)
    running = start()
    pipeline.wait_for_manifest(1)
    running.stop()
    assert running.trainer.batches
    assert [report.version for report in pipeline.reports()] == [1]
    assert pipeline.store.load(pipeline.reports()[0].checkpoint).version == 1
    assert_books(pipeline)


def test_reading_that_fails_ends_the_learner(pipeline: Pipeline, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start()
    pipeline.wait_for_manifest(0)

    def fails(*_: object, **__: object) -> list[object]:
        raise OSError(5, "the network is gone")

    monkeypatch.setattr("echo_bus.reader.LogReader.read", fails)
    with pytest.raises(OSError, match="the network is gone"):
        running.join()
