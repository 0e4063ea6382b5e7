"""The overlap condition and the staleness bound: the paper's numbers, and how the rules move with theirs."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_core.capacity.overlap import (
    GAMMA,
    Demand,
    bubble_share,
    cost_per_step,
    fresh_rate,
    min_rate,
    needed_rate,
    staleness_bound,
    wait_s,
)
from echo_schemas.errors import UserError
from tests.thorough import examples

# ECHO-2 §5: T_train at S = 3, T_bcast of table 2. R = 128 prompts · 16 rollouts is inferred.
PAPER = Demand(train_s=1631.2, broadcast_s=1437.0, rollouts=2048)
DEMANDS = st.builds(Demand, train_s=st.floats(0.1, 1e4), broadcast_s=st.floats(0.0, 1e4), rollouts=st.integers(1, 10_000))
PERIODS = st.integers(1, 12)


def overlap_bound(demand: Demand, publication_period: int) -> float:
    """Eq. 12: the largest staleness of any pool that reaches `min_rate`."""
    if math.isinf(min_rate(demand, publication_period)):
        return math.inf
    late = (1 - 1 / publication_period) * demand.broadcast_s / demand.train_s
    return publication_period + math.ceil(late - 1e-9)


def test_the_papers_settings_need_nine_workers_of_a_quarter_of_a_rollout_a_second() -> None:
    assert min_rate(PAPER, 2) == pytest.approx(2.2439, abs=1e-4)
    assert GAMMA * min_rate(PAPER, 2) == pytest.approx(2.4683, abs=1e-4)
    assert GAMMA * min_rate(PAPER, 2) / 9 == pytest.approx(0.274, abs=1e-3)


def test_with_them_no_sample_is_more_than_three_versions_old_as_the_paper_says() -> None:
    assert staleness_bound(PAPER, 2, GAMMA * min_rate(PAPER, 2)) == 3
    assert overlap_bound(PAPER, 2) == 3
    assert fresh_rate(PAPER, 2, 3) == pytest.approx(1.1220, abs=1e-4)
    assert needed_rate(PAPER, 2, 3) == pytest.approx(2.4683, abs=1e-4)
    assert needed_rate(PAPER, 2, 2) == pytest.approx(11.600, abs=1e-3)


def test_both_rows_of_the_star_in_table_2_wait_as_long_as_the_rule_says_with_workers_of_nearly_one_speed() -> None:
    """Solved for the rate, the two rows name 0.291 and 0.278 rollouts/s a worker; with these, chains wait 0 s, as in the table."""
    rates = []
    for workers, broadcast_s, waited_s in ((9, 1830.0, 131.9), (10, 1872.0, 84.1)):
        star = Demand(train_s=1631.2, broadcast_s=broadcast_s, rollouts=2048)
        rate = 4096 / (waited_s + 2 * star.train_s - broadcast_s)
        assert wait_s(star, 2, rate) == pytest.approx(waited_s)
        assert wait_s(PAPER, 2, rate) == 0.0
        rates.append(rate / workers)
    assert rates == [pytest.approx(0.2909, abs=1e-3), pytest.approx(0.2778, abs=1e-3)]


def test_a_step_costs_a_third_less_than_the_papers_baselines() -> None:
    price = 8 * 0.35 + 4 * 3.06
    ours = cost_per_step(PAPER, 2, 100.0, price)
    assert ours == pytest.approx(6.81, abs=0.01)
    assert 1 - ours / (8 * 3.06 * 1508.2 / 3600) == pytest.approx(0.335, abs=0.002)
    assert 1 - ours / (8 * 3.06 * 1582.3 / 3600) == pytest.approx(0.367, abs=0.002)


def test_weights_that_take_a_whole_period_leave_no_rate_that_would_do() -> None:
    slow = Demand(train_s=100.0, broadcast_s=200.0, rollouts=10)
    assert min_rate(slow, 1) == min_rate(slow, 2) == overlap_bound(slow, 2) == math.inf
    assert min_rate(slow, 3) == pytest.approx(0.3)


def test_nobody_at_work_means_waiting_for_ever() -> None:
    assert (wait_s(PAPER, 2, 0.0), staleness_bound(PAPER, 2, 0.0), bubble_share(PAPER, 2, 0.0)) == (math.inf, math.inf, 1.0)


@pytest.mark.parametrize(
    ("train_s", "broadcast_s", "rollouts"), [(0.0, 1.0, 1), (math.nan, 1.0, 1), (1.0, -1.0, 1), (1.0, math.inf, 1), (1.0, 1.0, 0)]
)
def test_numbers_that_no_run_can_have_are_a_sentence(train_s: float, broadcast_s: float, rollouts: int) -> None:
    with pytest.raises(UserError) as refused:
        Demand(train_s=train_s, broadcast_s=broadcast_s, rollouts=rollouts)
    assert refused.value.hint


@settings(max_examples=examples(400))
@given(DEMANDS, PERIODS, st.floats(1.0, 2.0))
def test_at_the_target_the_learner_never_waits_and_both_bounds_hold(demand: Demand, period: int, gamma: float) -> None:
    target = gamma * min_rate(demand, period)
    assume(math.isfinite(target))
    assert wait_s(demand, period, target) <= 1e-6 * period * demand.train_s
    assert bubble_share(demand, period, target) <= 1e-6
    assert period <= staleness_bound(demand, period, target) <= overlap_bound(demand, period)


@settings(max_examples=examples(400))
@given(DEMANDS, PERIODS, st.integers(1, 12))
def test_the_needed_rate_keeps_the_budget(demand: Demand, period: int, budget: int) -> None:
    rate = needed_rate(demand, period, budget)
    assume(math.isfinite(rate))
    assert staleness_bound(demand, period, rate) <= budget


@settings(max_examples=examples(200))
@given(DEMANDS, PERIODS, st.floats(1.01, 3.0))
def test_more_work_and_slower_weights_need_more_longer_steps_and_longer_periods_less(demand: Demand, period: int, factor: float) -> None:
    least = min_rate(demand, period) * (1 - 1e-9)
    heavier = Demand(train_s=demand.train_s, broadcast_s=demand.broadcast_s, rollouts=math.ceil(demand.rollouts * factor))
    slower = Demand(train_s=demand.train_s, broadcast_s=demand.broadcast_s * factor, rollouts=demand.rollouts)
    longer = Demand(train_s=demand.train_s * factor, broadcast_s=demand.broadcast_s, rollouts=demand.rollouts)
    assert min_rate(heavier, period) >= least
    assert min_rate(slower, period) >= least
    assert min_rate(longer, period) * (1 - 1e-9) <= min_rate(demand, period)
    assert min_rate(demand, period + 1) * (1 - 1e-9) <= min_rate(demand, period)


@settings(max_examples=examples(200))
@given(DEMANDS, PERIODS, st.floats(0.01, 1e3), st.floats(1.0, 10.0))
def test_a_faster_pool_never_waits_longer_nor_makes_older_samples(demand: Demand, period: int, rate: float, factor: float) -> None:
    assert wait_s(demand, period, rate * factor) <= wait_s(demand, period, rate)
    assert staleness_bound(demand, period, rate * factor) <= staleness_bound(demand, period, rate)
