"""Who gets work, by the workers' own words: who is ready, who is presumed dead, whose partitions are whose; and how fast each is."""

from __future__ import annotations

import pytest

from echo_bus.requests.roster import Roster, Shares
from echo_core.capacity.estimates import Speed
from echo_core.patience import StepPace
from echo_rollout.joining import ready_others
from echo_schemas.records import WorkerState, WorkerStatus


def word(worker: str, *partitions: int, state: WorkerState = WorkerState.READY, rate: float = 8.0, time_ms: int = 0) -> WorkerStatus:
    return WorkerStatus(
        run_id="demo",
        worker_id=worker,
        host="h",
        engine="e",
        state=state,
        rollouts_per_s=rate,
        partitions=partitions,
        capacity=16,
        time_ms=time_ms,
    )


def roster(*words: WorkerStatus, heartbeat_s: float = 1.0) -> Roster:
    made = Roster(heartbeat_s=heartbeat_s, group_size=4)
    for status in words:
        made.heard(status, 100.0)
    return made


def held(shares: Shares) -> list[tuple[set[int], float]]:
    return [(set(owner.partitions), owner.groups_per_s) for owner in shares.owners]


def test_work_goes_to_those_who_are_ready_counted_in_groups() -> None:
    shares = roster(word("a", 0, 1), word("b", 2, rate=2.0), word("c", 3, state=WorkerState.STARTING)).shares(100.0)
    assert held(shares) == [({0, 1}, 2.0), ({2}, 0.5)]
    assert not shares.alone


def test_while_nobody_is_ready_those_that_start_get_the_first_work() -> None:
    shares = roster(word("a", 0, state=WorkerState.STARTING, rate=0.0)).shares(100.0)
    assert held(shares) == [({0}, 0.0)]
    assert shares.alone
    # A second one that is on its way: neither may be given what only one of them could do.
    both = roster(word("a", 0, state=WorkerState.STARTING), word("b", state=WorkerState.STARTING)).shares(100.0)
    assert len(both.owners) == 1
    assert not both.alone


@pytest.mark.parametrize("state", [WorkerState.GONE, WorkerState.DRAINING, WorkerState.STANDBY])
def test_who_leaves_or_stands_by_gets_nothing(state: WorkerState) -> None:
    shares = roster(word("a", 0), word("b", 1, state=state)).shares(100.0)
    assert held(shares) == [({0}, 2.0)]
    assert shares.alone == (state is not WorkerState.DRAINING), "one that leaves may have something in hand still"


def test_a_worker_that_is_silent_has_died_and_the_other_is_alone() -> None:
    pool = roster(word("a", 0), word("b", 1))
    pool.heard(word("a", 0), 104.0)
    assert len(pool.shares(104.9).owners) == 2
    shares = pool.shares(105.1)
    assert held(shares) == [({0}, 2.0)]
    assert shares.alone
    assert len(roster(word("a", 0), heartbeat_s=10.0).shares(149.0).owners) == 1


def test_words_of_an_earlier_start_count_as_old_as_they_are() -> None:
    pool = Roster(heartbeat_s=1.0, group_size=4)
    pool.found({"long gone": word("long gone", 0, time_ms=1_000), "here": word("here", 1, time_ms=59_000)}, 10.0, 60_000)
    assert held(pool.shares(10.0)) == [({1}, 2.0)]


def test_the_last_to_claim_a_partition_comes_last() -> None:
    pool = roster(word("b", 0), word("a", 0))
    pool.heard(word("b", 0, rate=4.0), 101.0)
    assert [owner.groups_per_s for owner in pool.shares(101.0).owners] == [2.0, 1.0]


def test_a_step_takes_the_median_of_the_last_five_and_the_first_version_seen_measures_nothing() -> None:
    assert StepPace().step_s is None
    pace = StepPace()
    pace.saw(7, 100.0)
    for version, now_s in ((7, 150.0), (8, 160.0), (10, 164.0), (11, 165.0)):
        pace.saw(version, now_s)
    assert pace.step_s == 2.0
    for version, now_s in ((12, 169.0), (13, 173.0), (14, 177.0), (15, 181.0)):
        pace.saw(version, now_s)
    assert pace.step_s == 4.0


def test_a_worker_that_the_topic_does_not_know_any_more_is_forgotten() -> None:
    made = roster(word("a", 0), word("b", 1))
    made.forget("a")
    made.forget("nobody")
    assert held(made.shares(100.0)) == [({1}, 2.0)]


def test_who_takes_requests_is_waited_for_and_nobody_else() -> None:
    statuses = [word("a"), word("b"), word("c", state=WorkerState.STARTING), word("d", state=WorkerState.GONE)]
    assert ready_others(statuses, "b") == {"a"}


def speed_after(*seconds: tuple[float, int]) -> float:
    speed = Speed()
    for busy_s, samples in seconds:
        speed.add(busy_s=busy_s, samples=samples, tokens=samples)
    assert speed.tokens_per_s == speed.samples_per_s
    return speed.samples_per_s


def test_speed_is_the_mean_of_the_last_seconds_of_work() -> None:
    assert speed_after() == 0.0
    assert speed_after(*[(1.0, 10)] * 100) == pytest.approx(10.0)
    assert speed_after(*[(1.0, 10)] * 100, *[(1.0, 20)] * 100) == pytest.approx(20.0, rel=0.01)


def test_one_whose_groups_take_a_minute_is_neither_fast_when_one_ends_nor_slow_before() -> None:
    a_minute = [(1.0, 0)] * 59 + [(1.0, 16)]
    assert speed_after(*a_minute) == pytest.approx(16 / 60)
    assert speed_after(*a_minute, *[(1.0, 0)] * 59) == pytest.approx(16 / 60)
    assert speed_after(*a_minute, *[(1.0, 0)] * 240) == pytest.approx(16 / 240)


def test_only_a_word_that_moves_work_is_news() -> None:
    made = Roster(heartbeat_s=1.0, group_size=4)
    assert made.heard(word("a", 0, 1), 100.0)
    assert not made.heard(word("a", 0, 1, rate=9.0, time_ms=1000), 101.0), "that it still works, a little faster, is none"
    assert made.heard(word("a", 0), 102.0)
    assert made.heard(word("a", 0, state=WorkerState.DRAINING), 103.0)
