"""Unequal workers: whatever their speeds, none starves, nothing grows old with a slow one, and together they do what each could alone."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_core.work_shares import FEEDBACK_S, OpenWorkers, WorkerLoad, allowances, horizon_of
from tests.thorough import examples

RATES = st.floats(0.01, 200.0)
LOADS = st.lists(
    st.builds(WorkerLoad, groups_per_s=st.one_of(st.just(0.0), RATES), outstanding=st.integers(0, 80), capacity=st.integers(0, 64)),
    min_size=1,
    max_size=6,
)
WINDOWS = st.integers(1, 64)
HORIZONS = st.floats(0.0, 20.0)


def next_worker(loads: Sequence[WorkerLoad], *, window: int, horizon_s: float = 0.0, alone: bool = False) -> int | None:
    return OpenWorkers(loads, window=window, horizon_s=horizon_s, alone=alone).take()


def load(rate: float, outstanding: int = 0, capacity: int = 0) -> WorkerLoad:
    return WorkerLoad(groups_per_s=rate, outstanding=outstanding, capacity=capacity)


@pytest.mark.parametrize("rate", [1e308, 5e-324])
def test_a_rate_that_somebody_made_up_stays_within_the_window(rate: float) -> None:
    loads = [load(rate), load(2.0), load(5e-324)]
    assert all(1 <= allowed <= 100 for allowed in allowances(loads, window=100, horizon_s=30.0))
    assert next_worker(loads, window=100, horizon_s=30.0) is not None


@given(loads=LOADS, window=WINDOWS, horizon_s=HORIZONS, count=st.integers(1, 40))
def test_many_in_a_row_go_where_each_alone_would_go(loads: list[WorkerLoad], window: int, horizon_s: float, count: int) -> None:
    many = OpenWorkers(loads, window=window, horizon_s=horizon_s)
    for _ in range(count):
        chosen = next_worker(loads, window=window, horizon_s=horizon_s)
        assert many.take() == chosen
        if chosen is not None:
            loads[chosen] = replace(loads[chosen], outstanding=loads[chosen].outstanding + 1)


def test_whoever_is_five_times_slower_may_have_a_fifth() -> None:
    assert allowances([load(20.0), load(4.0)], window=100) == [100, 20]


def test_the_horizon_lets_a_slow_one_have_more_but_nobody_more_than_the_window() -> None:
    assert allowances([load(20.0), load(4.0)], window=100, horizon_s=10.0) == [100, 40]
    assert allowances([load(20.0), load(4.0)], window=100, horizon_s=100.0) == [100, 100]


def test_a_worker_whose_group_takes_a_minute_has_one_in_work_and_none_that_waits() -> None:
    assert allowances([load(20.0), load(1 / 60)], window=32) == [32, 1]
    # One that would stand idle for a good part of its time has the next one beside it.
    assert allowances([load(20.0), load(0.5)], window=32) == [32, 2]


def test_a_newcomer_shows_what_it_does_with_a_small_part() -> None:
    assert allowances([load(20.0), load(0.0)], window=32) == [32, 4]
    assert allowances([load(0.0), load(0.0)], window=8) == [2, 2]
    assert allowances([load(0.0)], window=32, alone=True) == [32]


def test_nobody_has_more_than_it_takes_in_hand() -> None:
    assert allowances([load(20.0, capacity=6), load(20.0)], window=32) == [6, 32]


def test_who_has_nothing_comes_first_then_whose_work_is_the_soonest_done() -> None:
    assert next_worker([load(20.0, 3), load(0.1, 0)], window=32) == 1
    assert next_worker([load(20.0, 0), load(0.1, 0)], window=32) == 0
    assert next_worker([load(20.0, 10), load(4.0, 1)], window=32) == 1
    assert next_worker([load(20.0, 4), load(4.0, 1)], window=32) == 0
    assert next_worker([load(20.0, 32), load(4.0, 7)], window=32) is None


@given(LOADS, WINDOWS, HORIZONS)
def test_an_idle_worker_is_served_before_any_other_and_the_window_is_nobodys_to_exceed(
    loads: list[WorkerLoad], window: int, horizon_s: float
) -> None:
    allowed = allowances(loads, window=window, horizon_s=horizon_s)
    assert all(1 <= each <= window for each in allowed)
    chosen = next_worker(loads, window=window, horizon_s=horizon_s)
    if any(each.outstanding == 0 for each in loads):
        assert chosen is not None
        assert loads[chosen].outstanding == 0
    elif chosen is None:
        assert all(each.outstanding >= most for each, most in zip(loads, allowed, strict=True))
    else:
        assert loads[chosen].outstanding < allowed[chosen]


@given(st.lists(RATES, min_size=2, max_size=6), WINDOWS, HORIZONS)
def test_what_a_worker_is_allowed_is_done_in_bounded_time(rates: list[float], window: int, horizon_s: float) -> None:
    """The age of its queue: the fastest one's, the horizon, or one feedback; and two groups of its own."""
    for rate, most in zip(rates, allowances([load(rate) for rate in rates], window=window, horizon_s=horizon_s), strict=True):
        assert most / rate <= max(window / max(rates), horizon_s, FEEDBACK_S) + 2 / rate + 1e-6


@pytest.mark.parametrize(("budget", "step_s", "wanted"), [(3, 2.0, 4.5), (0, 2.0, 0.0), (3, None, 0.0)])
def test_the_horizon_is_three_quarters_of_the_time_within_which_a_sample_is_fresh(budget: int, step_s: float | None, wanted: float) -> None:
    assert horizon_of(budget, step_s) == wanted


class Pool:
    """Workers that finish one group after the other, each at its own speed, and a requester that hears of it `FEEDBACK_S` later."""

    def __init__(self, speeds: list[float], window: int) -> None:
        self._speeds = speeds
        self._window = window
        self._queues: list[deque[float]] = [deque() for _ in speeds]
        self._known = [0] * len(speeds)
        self._events: list[tuple[float, int, int, bool]] = []
        self._num_events = 0
        self.done = [0] * len(speeds)
        self.oldest_s = [0.0] * len(speeds)

    def run(self, seconds: float) -> None:
        now_s = 0.0
        self._hand_out(now_s)
        while self._events and self._events[0][0] <= seconds:
            now_s, _, worker, is_heard = heapq.heappop(self._events)
            if is_heard:
                self._known[worker] -= 1
                self._hand_out(now_s)
                continue
            issued_s = self._queues[worker].popleft()
            self.done[worker] += 1
            self.oldest_s[worker] = max(self.oldest_s[worker], now_s - issued_s)
            self._after(now_s + FEEDBACK_S, worker, is_heard=True)
            if self._queues[worker]:
                self._after(now_s + 1 / self._speeds[worker], worker, is_heard=False)

    def _hand_out(self, now_s: float) -> None:
        while (
            worker := next_worker([load(speed, known) for speed, known in zip(self._speeds, self._known, strict=True)], window=self._window)
        ) is not None:
            self._known[worker] += 1
            self._queues[worker].append(now_s)
            if len(self._queues[worker]) == 1:
                self._after(now_s + 1 / self._speeds[worker], worker, is_heard=False)

    def _after(self, time_s: float, worker: int, *, is_heard: bool) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, worker, is_heard))


@settings(max_examples=examples(25))
@given(speeds=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=4), window=st.integers(16, 64))
def test_every_worker_is_as_busy_as_it_would_be_alone_and_no_queue_grows_old(speeds: list[float], window: int) -> None:
    seconds = 200 / max(speeds) + 4 / min(speeds)
    assume(seconds * sum(speeds) < 3_000)
    pool = Pool(speeds, window)
    pool.run(seconds)
    for speed, done, oldest_s in zip(speeds, pool.done, pool.oldest_s, strict=True):
        # A window below what the fastest one finishes within a feedback is what holds it back, not the others.
        alone = min(speed, window / (FEEDBACK_S + 1 / speed))
        assert done >= 0.9 * alone * seconds - 2
        assert oldest_s <= max(window / max(speeds), FEEDBACK_S) + 2 / speed + 1 / speed
