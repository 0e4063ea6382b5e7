"""A learner that waits: for rewards, for whole groups, for the operator. What it says meanwhile, and what it does when time is up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.clock import ManualClock
from echo_learner.orders import refuse_stopped
from echo_schemas.columns import FLAG_DTYPE, VALUE_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import (
    Control,
    Coordinates,
    DropReason,
    MissingRewards,
    Progress,
    RewardControl,
    RewardOutcome,
    RewardTerm,
    RunControl,
    RunState,
    StepReport,
)
from echo_schemas.topics import CONTROL, PROGRESS, REWARDS, STEPS, TRAJECTORIES
from echo_settings import Settings
from tests.unit.core.records import reward
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline, Running, assert_books, fill, sample

pytestmark = pytest.mark.slow

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
    """A step, after which the learner ends."""
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
    running, started_s = start(), clock.monotonic_s()

    def is_dropped() -> bool:
        clock.advance(5.0)
        return bool(pipeline.drops())

    running.wait_until(is_dropped, "the group is dropped")
    assert clock.monotonic_s() - started_s > least_s
    train_one_step(pipeline, running)
    assert_dropped(pipeline, running, DropReason.UNREWARDED, places, 7)


def test_drops_are_public_and_durable_although_no_step_comes(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    for seq in range(4):
        pipeline.write_group(seq, values=(None, None))
    running = start()
    running.wait_for_value(OPEN, 4)
    wait_while_time_passes(running, clock, OPEN, 0)

    def are_public() -> bool:
        clock.advance(5.0)
        return len(pipeline.drops()) == 12

    running.wait_until(are_public, "eight records and four seqs are dropped in the log")
    progress = pipeline.wait_for(PROGRESS, Progress, lambda each: each.groups_dropped == 4, "progress that says so")
    assert (progress.version, progress.next_seq) == (0, 4)
    kept = [pipeline.store.load(name) for name in pipeline.store.ids()]
    by_drops = [state for state in kept if state.weights_of is not None]
    assert [state.assembly.floor for state in by_drops] == [4]
    running.stop()
    # Another learner knows it, trains on, and tells nobody again.
    fill(pipeline, 3, start=2)
    pipeline.train(NumpyTrainer(), steps=1)
    assert len(pipeline.drops()) == 12
    (report,) = pipeline.reports()
    assert report.parent == by_drops[0].weights_of
    assert pipeline.store.load(report.checkpoint).groups_dropped == 4
    assert_books(pipeline)


def test_drops_between_two_publications_take_the_reports_along(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    sections: dict[str, Any] = {"staleness": {"budget": 3, "publication_period": 3}, "checkpoint": {"every": 3}}
    fill(pipeline, 1)
    running = start(**sections)
    running.wait_for_value("echo_learner_version", 1)
    for seq in (2, 3, 5):
        pipeline.write_group(seq, values=(None, None))
    running.wait_for_value(OPEN, 3)
    wait_while_time_passes(running, clock, OPEN, 0)

    def are_public() -> bool:
        clock.advance(5.0)
        return len(pipeline.drops()) == 9

    running.wait_until(are_public, "three groups are dropped in the log")
    running.stop()
    assert [report.version for report in pipeline.reports()] == [1]
    assert [manifest.version for manifest in pipeline.manifests()] == [0]
    for seq in (4, 6, 7, 8):
        pipeline.write_group(seq)
    weights = NumpyTrainer()
    pipeline.train(weights, steps=3, **sections)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]
    assert len(pipeline.drops()) == 9
    assert_books(pipeline)


@pytest.mark.parametrize(
    ("values", "says"),
    [((1.0, None), "Samples wait: 2 for the reward 'exact'. Look at the log of the reward processes."), (None, "Nothing else has come.")],
    ids=["no reward", "no trajectory"],
)
def test_a_learner_that_waits_says_for_what(
    pipeline: Pipeline, clock: ManualClock, start: Start, values: tuple[float, None] | None, says: str
) -> None:
    for seq in range(2 if values else 0):
        pipeline.write_group(seq, values=values or ())
    running = start()
    running.wait_for_value(OPEN, 2 if values else 0)
    pipeline.wait_for_manifest(0)
    found: dict[str, str] = {}

    def says_it() -> bool:
        clock.advance(1.0)
        found.update(running.process.notices.current())
        return bool(found)

    running.wait_until(says_it, "the learner says that it waits")
    assert found["batch"].startswith("No batch for ")
    assert says in found["batch"]


def test_a_learner_names_the_records_whose_rewards_stay_away(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    places = pipeline.write_group(7, values=(1.0, None))
    running = start()
    running.wait_for_value(OPEN, 1)
    named: list[MissingRewards] = []

    def is_named() -> bool:
        clock.advance(1.0)
        named[:] = pipeline.read(PROGRESS, MissingRewards)
        return bool(named)

    running.wait_until(is_named, "the learner names what it misses")
    assert (named[0].rewards, named[0].where) == (("exact",), (places[1],))
    pipeline.write_reward(sample(7, 1), places[1], 0.5)

    def is_taken_back() -> bool:
        clock.advance(1.0)
        named[:] = pipeline.read(PROGRESS, MissingRewards)
        return not named[-1].where

    running.wait_until(is_taken_back, "the learner misses nothing any more")


def test_a_reward_that_only_fails_ends_the_run_with_its_message(
    pipeline: Pipeline, clock: ManualClock, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fail_everywhere(pipeline, range(4))
    running = start()
    running.wait_for_value(OPEN, 4)
    running.wait_until(lambda: "The reward 'exact' has failed once: KeyError: 'answer'" in caplog.text, "the first failure is in the log")
    with pytest.raises(UserError, match=r"'exact' has failed 8 times in a row, for \d+ s: KeyError: 'answer'"):
        wait_while_time_passes(running, clock, "echo_learner_version", 1)
    # The drops of the groups that it cost are out, or will be found again.
    assert_books(pipeline, num_open=len(pipeline.accounts().open))


def test_the_run_goes_on_without_a_reward_that_only_fails_if_it_is_told_to(pipeline: Pipeline, clock: ManualClock, start: Start) -> None:
    pipeline.options |= {"rewards": {"exact": 1.0, "judge": 0.5}}
    pipeline.options["scoring"] |= {"when_failing": "go_on"}
    fail_everywhere(pipeline, range(4), name="judge")
    running = start()
    running.wait_for_value(OPEN, 4)
    wait_while_time_passes(running, clock, OPEN, 0)
    fill(pipeline, 3, start=2)
    wait_while_time_passes(running, clock, "echo_learner_version", 1)
    running.stop()
    (report,) = pipeline.reports()
    assert {term.name: term.is_awaited for term in report.reward_terms} == {"exact": True, "judge": False}


def fail_everywhere(pipeline: Pipeline, seqs: range, name: str = "exact") -> None:
    """Groups whose reward `name` fails for every sample."""
    for seq in seqs:
        for index, where in enumerate(pipeline.write_group(seq, values=(None, None))):
            pipeline.write_reward(sample(seq, index), where, None, name=name, error="KeyError: 'answer'")


def test_a_reward_of_weight_zero_is_not_waited_for(pipeline: Pipeline) -> None:
    pipeline.options = {"rewards": {"exact": 1.0, "return": 0.0}}
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    (report,) = pipeline.reports()
    assert {stats.name: stats.maximum for stats in report.reward_stats} == {"exact": 1.0, "return": 0.0, "total": 1.0}


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


def test_a_run_that_is_stopped_by_an_order_ends_after_its_step_and_is_not_begun_again_until_it_may(
    pipeline: Pipeline, start: Start
) -> None:
    def order(epoch: int, state: RunState) -> None:
        control = Control(run_id="demo", epoch=epoch, run=RunControl(state=state), issued_by="somebody", time_ms=epoch)
        pipeline.write(CONTROL, control)

    fill(pipeline, 1)
    running = start(learner={"steps": 2})
    pipeline.wait_for_manifest(1)
    order(1, RunState.STOPPING)
    running.join()
    assert [report.version for report in pipeline.reports()] == [1]
    assert pipeline.store.load(pipeline.reports()[0].checkpoint).version == 1
    assert_books(pipeline)
    bus = running.process.bus
    with pytest.raises(UserError, match="told to stop, by somebody") as caught:
        refuse_stopped(bus, "demo")
    assert "runs resume demo" in (caught.value.hint or "")
    order(2, RunState.RUNNING)
    refuse_stopped(bus, "demo")
    refuse_stopped(bus, "another")


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

    monkeypatch.setattr("echo_bus.reading.reader.LogReader.read", fails)
    with pytest.raises(OSError, match="the network is gone"):
        running.join()


def test_a_reward_counts_only_from_the_application_that_the_file_names(pipeline: Pipeline) -> None:
    """The other one's come first, and would count if nobody were named."""
    for seq in range(GROUPS_PER_STEP):
        members = [sample(seq, index) for index in range(GROUP_SIZE)]
        places = list(zip(members, pipeline.write(TRAJECTORIES, *members), strict=True))
        for application, offset in (("shadow", 10.0), ("judges", 0.0)):
            for member, where in places:
                given = reward(where, member.seq, index=member.index, value=offset + member.index, application=application)
                pipeline.write(REWARDS, given, partition=where.partition)
    running = pipeline.start(NumpyTrainer(), learner={"steps": 1}, scoring={"applications": {"exact": "judges"}})
    running.join()
    (report,) = pipeline.read(STEPS, StepReport)
    assert report.batch is not None
    assert np.frombuffer(report.batch.rewards[0].values, VALUE_DTYPE).tolist() == [*range(GROUP_SIZE)] * GROUPS_PER_STEP
    assert "comes from the application 'shadow' and is not counted" in running.process.notices.current()["writer of exact"]


def test_an_application_for_a_reward_that_the_file_does_not_have_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"\[scoring.applications\] names 'exakt', which is no reward of this file: exact"):
        Settings.model_validate({"run": {"name": "demo"}, "scoring": {"applications": {"exakt": "main"}}})
