"""The simulated fleet keeps what the rules promise, and shows what hysteresis is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_core.capacity.activation import Candidate, total_rate
from echo_core.capacity.overlap import Demand, needed_rate, staleness_bound
from echo_core.capacity.simulation import (
    AllOn,
    BatchOrder,
    ChosenAnew,
    FixedPool,
    Hysteresis,
    Machine,
    Scenario,
    simulate,
)
from echo_core.capacity.sizing import PoolSizer, SizingPolicy
from echo_core.policy import Admission, StalenessPolicy
from tests.thorough import examples

HOUR_S = 3600.0


def workers(*rates: float) -> list[Candidate]:
    return [Candidate(worker_id=f"w{index}", rate=rate, price_per_hour=1.0) for index, rate in enumerate(rates)]


def policy(budget: int, period: int, rollouts: int, admission: Admission) -> StalenessPolicy:
    return StalenessPolicy(
        budget=budget, publication_period=period, groups_per_step=rollouts, group_size=1, min_group_size=1, admission=admission
    )


def pool_that_goes_and_comes(seed: int) -> Scenario:
    machines = [
        Machine(worker=Candidate(worker_id=f"spot-{index}", rate=0.2, price_per_hour=0.4), mean_up_s=6 * HOUR_S, mean_down_s=HOUR_S)
        for index in range(10)
    ]
    return Scenario(
        demand=Demand(train_s=1600.0, broadcast_s=120.0, rollouts=1024),
        policy=StalenessPolicy(budget=3, publication_period=2, groups_per_step=64, group_size=16),
        machines=machines,
        steps=40,
        spread=0.05,
        tick_s=120.0,
        seed=seed,
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    rates=st.lists(st.floats(0.5, 3.0), min_size=1, max_size=5),
    rollouts=st.integers(20, 60),
    broadcast_share=st.floats(0.0, 1.5),
    budget=st.integers(2, 5),
    period=st.integers(1, 4),
    spare=st.floats(1.0, 2.0),
)
def test_a_pool_that_the_rule_calls_enough_never_lets_the_learner_wait_nor_exceeds_the_bound(
    rates: list[float], rollouts: int, broadcast_share: float, budget: int, period: int, spare: float
) -> None:
    """The bound's conditions: newest first, even rates, nobody leaves; the slowest sample's time is part of T_bcast, and one sample of each
    worker is part of R, because a sample that is begun is nothing yet.
    """
    pool, slowest_s = workers(*rates), 1 / min(rates)
    train_s = spare * 1.2 * (rollouts + len(pool)) / sum(rates)
    demand = Demand(train_s=train_s, broadcast_s=broadcast_share * train_s, rollouts=rollouts)
    counted = replace(demand, broadcast_s=demand.broadcast_s + slowest_s, rollouts=rollouts + len(pool))
    assume(period <= budget and total_rate(pool) >= needed_rate(counted, period, budget, 1.0))
    scenario = Scenario(
        demand=demand,
        policy=policy(budget, period, rollouts, Admission.FREE),
        machines=[Machine(worker=each) for each in pool],
        steps=30,
        order=BatchOrder.NEWEST_FIRST,
    )
    outcome = simulate(scenario, AllOn())
    assert outcome.steps == 30
    assert len(outcome.staleness) - 1 <= staleness_bound(counted, period, total_rate(pool)) <= budget
    assert outcome.bubble_ratio < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_under_pace_nothing_is_too_old_whatever_comes_and_goes(seed: int) -> None:
    scenario = pool_that_goes_and_comes(seed)
    outcome = simulate(scenario, Hysteresis(PoolSizer(SizingPolicy())))
    assert outcome.steps == 40
    assert len(outcome.staleness) - 1 <= scenario.policy.budget
    assert outcome.num_stale == 0
    # The batch after the last step is taken, too.
    assert sum(outcome.staleness) == 41 * 64


def test_hysteresis_waits_less_than_a_fixed_pool_and_costs_less_than_all() -> None:
    scenario = pool_that_goes_and_comes(7)
    steady = simulate(scenario, Hysteresis(PoolSizer(SizingPolicy())))
    fixed, everybody = simulate(scenario, FixedPool()), simulate(scenario, AllOn())
    assert steady.bubble_ratio < fixed.bubble_ratio
    assert steady.cost_per_step < 0.7 * everybody.cost_per_step


def test_without_hysteresis_noise_alone_changes_the_pool_at_nearly_every_look() -> None:
    scenario = replace(pool_that_goes_and_comes(7), steps=10)
    anew, steady = simulate(scenario, ChosenAnew()), simulate(scenario, Hysteresis(PoolSizer(SizingPolicy())))
    assert anew.num_activated > 20 * steady.num_activated


def test_a_seed_repeats_a_simulation() -> None:
    scenario = replace(pool_that_goes_and_comes(3), steps=10)
    assert simulate(scenario, AllOn()) == simulate(scenario, AllOn())


def test_a_pool_that_is_too_slow_lets_the_learner_wait_as_long_as_it_lacks() -> None:
    """Half of R / T_train: each step takes twice its time."""
    demand = Demand(train_s=100.0, broadcast_s=0.0, rollouts=100)
    scenario = Scenario(
        demand=demand, policy=policy(3, 1, 100, Admission.PACE), machines=[Machine(worker=each) for each in workers(0.5)], steps=20
    )
    outcome = simulate(scenario, AllOn())
    assert outcome.bubble_ratio == pytest.approx(0.475, abs=0.03)
    assert outcome.cost_per_step == pytest.approx(200 / HOUR_S, rel=0.1)


def test_nobody_at_all_ends_the_simulation() -> None:
    scenario = Scenario(
        demand=Demand(train_s=1.0, broadcast_s=1.0, rollouts=2), policy=policy(3, 1, 2, Admission.PACE), machines=[], steps=3
    )
    assert simulate(scenario, AllOn()).steps == 0
