"""An application beside the run's own: where it begins, which groups it scores, and when it ends."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.clock import Deadline, ManualClock
from echo_core.group_share import is_chosen
from echo_memory import MemoryCluster
from echo_ops.rewards.recent import recent_trajectories
from echo_runtime.process import StopSignal
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Purpose, RewardAttachment
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import CONTROL, TRAJECTORIES, attachment_key
from echo_streams.attachment import RUN_OVER_S, RunEnd, end_when_detached
from echo_streams.beginning import Beginning, Since, as_time, num_between, offsets_of, parse_beginning, place_group, positions_of
from echo_streams.intake import Intake, Passed, Stale
from tests.unit.core.records import trajectory
from tests.unit.streams.stage import NAMESPACE
from tests.unit.streams.test_intake import headers

WAIT_S = 30.0
KEY = attachment_key("demo", "brevity")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bus(clock: ManualClock) -> Bus:
    cluster = MemoryCluster(clock=clock)
    topics = [NewTopic(f"{NAMESPACE.name}.{spec.name}", 2 if spec.name == TRAJECTORIES.name else 1, 1) for spec in load_topic_specs()]
    for future in cluster.admin().create_topics(topics).values():
        future.result(WAIT_S)
    return Bus(cluster=cluster, namespace=NAMESPACE, clock=clock, role="reward", run_id="demo")


def publish(bus: Bus, first: int, count: int, **changes: Any) -> None:
    with closing(bus.publisher()) as publisher:
        for seq in range(first, first + count):
            publisher.publish(TRAJECTORIES, trajectory(seq, **changes)).wait(WAIT_S)


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("now", Beginning(since=Since.NOW)),
        ("beginning", Beginning(since=Since.BEGINNING)),
        ("version:120", Beginning(since=Since.VERSION, version=120)),
        ("2026-11-20T10:00", Beginning(since=Since.TIME, time_ms=1_795_168_800_000)),
        ("2026-11-20T11:00+01:00", Beginning(since=Since.TIME, time_ms=1_795_168_800_000)),
    ],
)
def test_a_beginning_is_a_word_a_version_or_a_time(text: str, beginning: Beginning) -> None:
    assert parse_beginning(text) == beginning


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        *(("now", "now"), ("beginning", "beginning"), ("version:0", "beginning")),
        ("2026-11-20T11:00+01:00", "2026-11-20T10:00:00.000+00:00"),
    ],
)
def test_a_process_is_told_a_beginning_that_it_can_find_by_itself(bus: Bus, text: str, settled: str) -> None:
    assert as_time(bus, parse_beginning(text)) == settled
    assert offsets_of(bus, parse_beginning(settled)) == offsets_of(bus, parse_beginning(text))


@pytest.mark.parametrize("text", ["", "yesterday", "version:", "version:-1", "version:x", "10:00"])
def test_what_is_no_beginning_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UserError, match=r"no place to begin.*version:120"):
        parse_beginning(text)


def test_a_group_begins_where_it_was_told_to(bus: Bus, clock: ManualClock) -> None:
    publish(bus, 0, 10)
    clock.advance(60.0)
    halfway_ms = clock.time_ms()
    publish(bus, 10, 6)
    assert num_between(bus, offsets_of(bus, parse_beginning("beginning"))) == 16
    assert num_between(bus, offsets_of(bus, parse_beginning("now"))) == 0
    # A broker refuses times before 1970.
    assert parse_beginning("1960-01-01").time_ms == 0
    starts = offsets_of(bus, Beginning(since=Since.TIME, time_ms=halfway_ms))
    assert num_between(bus, starts) == 6
    group = NAMESPACE.group("reward", "brevity")
    assert positions_of(bus, group) == {}
    place_group(bus, group, starts)
    assert positions_of(bus, group) == starts


def test_a_reward_is_tried_on_what_was_trained_though_evaluations_came_after_it(bus: Bus) -> None:
    publish(bus, 0, 6)
    publish(bus, 6, 40, purpose=Purpose.EVAL)
    assert {item.trajectory.seq for item in recent_trajectories(bus, 6)} == set(range(6))


def test_a_version_that_is_not_trained_is_no_beginning(bus: Bus) -> None:
    with pytest.raises(UserError, match="Version 3 is not trained yet"):
        offsets_of(bus, parse_beginning("version:3"))
    assert offsets_of(bus, parse_beginning("version:0")) == {0: 0, 1: 0}


def test_the_same_groups_are_chosen_each_time_and_whole() -> None:
    names = [f"demo/{seq}" for seq in range(2000)]
    chosen = {name for name in names if is_chosen(name, 0.1)}
    assert 140 < len(chosen) < 260
    assert chosen <= {name for name in names if is_chosen(name, 0.5)}
    assert all(is_chosen(name, 1.0) for name in names)
    seq = next(seq for seq in range(2000) if f"demo/{seq}" not in chosen)
    assert Intake("demo", budget=2, drop_stale=True, share=0.1).look(headers(seq), 0) is Passed.SAMPLED_OUT


def test_the_past_is_scored_at_any_age_and_what_comes_later_is_not() -> None:
    intake = Intake("demo", budget=2, drop_stale=True, live_from_ms=1_000)
    assert intake.look(headers(version=4), 100, 999) is None
    assert isinstance(intake.look(headers(version=4), 100, 1_000), Stale)
    assert isinstance(intake.look(headers(version=4), 100), Stale)


def order(epoch: int, *, is_attached: bool) -> Control:
    attachment = RewardAttachment(application="brevity", is_attached=is_attached)
    return Control(run_id="demo", epoch=epoch, attachment=attachment, issued_by="test", time_ms=epoch)


def test_an_order_to_detach_ends_it_and_one_from_before_does_not(bus: Bus) -> None:
    with closing(bus.publisher()) as publisher:
        publisher.publish(CONTROL, order(5, is_attached=False)).wait(WAIT_S)
        with closing(bus.orders()) as orders:
            orders.wait_for(KEY, lambda found: found.epoch == 5, Deadline.after(WAIT_S))
            # One that came while this process imported is for it.
            late = StopSignal()
            end_when_detached(orders, KEY, late, born_ms=4)
            assert late.is_set()
            stop = StopSignal()
            end_when_detached(orders, KEY, stop, born_ms=6)
            publisher.publish(CONTROL, order(6, is_attached=True)).wait(WAIT_S)
            orders.wait_for(KEY, lambda found: found.epoch == 6, Deadline.after(WAIT_S))
            assert not stop.is_set()
            publisher.publish(CONTROL, order(7, is_attached=False)).wait(WAIT_S)
            assert stop.wait(WAIT_S), "waited for the end that was ordered"


def test_the_run_is_over_when_nobody_speaks_and_nothing_is_left_to_score(clock: ManualClock) -> None:
    heard, scored = [0], [0]
    end = RunEnd(lambda: heard[0], lambda: scored[0], clock)
    assert not end.has_come()
    clock.advance(RUN_OVER_S - 1)
    scored[0] += 1
    assert not end.has_come()
    clock.advance(RUN_OVER_S - 1)
    assert not end.has_come()
    clock.advance(1)
    assert end.has_come()
