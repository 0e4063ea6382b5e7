"""The simulated fleet: small pools by hand, what the rules promise, repetition by seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_core.capacity.overlap import Demand, needed_rate, staleness_bound
from echo_core.policy import Admission, OverBudget, StalenessPolicy
from echo_core.simulation.fleet import simulate
from echo_core.simulation.scenario import (
    BatchOrder,
    Generation,
    Kind,
    PoolKind,
    PoolPlan,
    Route,
    Scenario,
    Weights,
)
from echo_core.simulation.weights import arrivals_s, broadcast_s, demand_of
from echo_schemas.errors import UserError
from tests.thorough import examples

AT_ONCE = Weights(route=Route.FIXED, fixed_s=0.0)
EVERYBODY = PoolPlan(kind=PoolKind.EVERYBODY)


def policy(budget: int = 3, period: int = 1, groups: int = 100, **rest: object) -> StalenessPolicy:
    values: dict[str, object] = {"group_size": 1, "min_group_size": 1, **rest}
    return StalenessPolicy(budget=budget, publication_period=period, groups_per_step=groups, **values)  # type: ignore[arg-type]


def scenario(*kinds: Kind, **rest: object) -> Scenario:
    values: dict[str, object] = {"train_s": 100.0, "policy": policy(), "weights": AT_ONCE, "steps": 20, "pool": EVERYBODY, **rest}
    return Scenario(kinds=kinds, **values)  # type: ignore[arg-type]


def spot(seed: int, kind: PoolKind = PoolKind.LIVE) -> Scenario:
    return Scenario(
        train_s=1600.0,
        policy=StalenessPolicy(budget=3, publication_period=2, groups_per_step=64, group_size=16),
        weights=Weights(route=Route.FIXED, fixed_s=120.0),
        kinds=[Kind(name="spot", count=10, rate=0.2, price_per_hour=0.4, failures_per_day=2, preemptions_per_day=2)],
        steps=40,
        generation=Generation(tail=0.3),
        pool=PoolPlan(kind=kind, every_s=120.0),
        seed=seed,
    )


def test_a_pool_that_is_too_slow_lets_the_learner_wait_as_long_as_it_lacks() -> None:
    """Half of R / T_train: a step takes 200 s, so at $1 an hour 200 / 3600."""
    outcome = simulate(scenario(Kind(name="w", count=1, rate=0.5, price_per_hour=1.0)))
    assert len(outcome.steps) == 20
    assert outcome.bubble_ratio == pytest.approx(0.5)
    assert outcome.steps_per_s == pytest.approx(1 / 200)
    assert outcome.cost_per_step == pytest.approx(200 / 3600)
    assert outcome.idle_cost == pytest.approx(0.0)
    assert outcome.wait_s(2) == pytest.approx(200.0)


def test_a_pool_that_is_twice_as_fast_as_needed_is_idle_half_of_the_time() -> None:
    outcome = simulate(scenario(Kind(name="w", count=2, rate=1.0, price_per_hour=3.0), learner_price_per_hour=6.0))
    assert outcome.bubble_ratio == 0.0
    assert outcome.cost_per_step == pytest.approx(12.0 * 100 / 3600)
    assert outcome.idle_cost / outcome.cost_by_kind["w"] == pytest.approx(0.5, abs=0.01)


def test_one_worker_of_three_versions_by_hand() -> None:
    """T_train = 10 s, R = 1, kappa = 1, S = 1, weights after 4 s, a group takes 5 s.

    Group 0 at 0-5 s and group 1 at 5-10 s under version 0; pace lets two be undecided. Step 0 trains at 5-15 s, step 1 at 15-25 s with a
    sample that is one version old. The third group begins at 15 s, but must be of version 1, which arrives at 19 s: it is there at 24 s.
    """
    made = scenario(
        Kind(name="w", count=1, rate=0.2),
        train_s=10.0,
        policy=policy(budget=1, period=1, groups=1),
        weights=Weights(route=Route.FIXED, fixed_s=4.0),
        steps=3,
        warmup_steps=0,
    )
    outcome = simulate(made)
    assert [(step.began_s, step.waited_s, dict(step.ages)) for step in outcome.steps] == [
        (5.0, 5.0, {0: 1}),
        (15.0, 0.0, {1: 1}),
        (25.0, 0.0, {1: 1}),
    ]
    assert outcome.broadcasts_s == [4.0, 4.0]


def test_rewards_that_take_time_delay_the_learner_and_not_the_worker() -> None:
    """R = 1, T_train = 1 s, a group takes 5 s: the first batch is there at 5 + 3 s; the second group ends at 10 s all the same."""
    made = scenario(
        Kind(name="w", count=1, rate=0.2),
        train_s=1.0,
        policy=policy(groups=1),
        generation=Generation(score_s=3.0),
        steps=2,
        warmup_steps=0,
    )
    assert [step.began_s for step in simulate(made).steps] == [8.0, 13.0]


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
    """The bound's conditions: newest first, even lengths, nobody leaves; the slowest sample's time is part of T_bcast, and one sample of
    each worker is part of R, because a sample that is begun is nothing yet.
    """
    train_s = spare * 1.2 * (rollouts + len(rates)) / sum(rates)
    demand = Demand(train_s=train_s, broadcast_s=broadcast_share * train_s, rollouts=rollouts)
    counted = replace(demand, broadcast_s=demand.broadcast_s + 1 / min(rates), rollouts=rollouts + len(rates))
    assume(period <= budget and sum(rates) >= needed_rate(counted, period, budget, 1.0))
    made = scenario(
        *(Kind(name=f"w{number}", count=1, rate=rate) for number, rate in enumerate(rates)),
        train_s=train_s,
        policy=policy(budget, period, rollouts, admission=Admission.FREE),
        weights=Weights(route=Route.FIXED, fixed_s=demand.broadcast_s),
        steps=30,
        order=BatchOrder.NEWEST_FIRST,
    )
    outcome = simulate(made)
    assert len(outcome.steps) == 30
    assert outcome.staleness_max <= staleness_bound(counted, period, sum(rates)) <= budget
    assert outcome.bubble_ratio < 1e-9


@settings(max_examples=examples(40), deadline=None)
@given(
    count=st.integers(1, 8),
    rate=st.floats(0.05, 3.0),
    tail=st.floats(0.0, 1.5),
    budget=st.integers(0, 4),
    admission=st.sampled_from(Admission),
    over_budget=st.sampled_from([OverBudget.DROP, OverBudget.WITHHOLD]),
    failures=st.floats(0.0, 500.0),
    seed=st.integers(0, 1000),
)
def test_nothing_above_the_budget_is_trained_and_shares_are_shares(
    count: int, rate: float, tail: float, budget: int, admission: Admission, over_budget: OverBudget, failures: float, seed: int
) -> None:
    made = scenario(
        Kind(name="w", count=count, rate=rate, groups_at_once=2, failures_per_day=failures, preemptions_per_day=failures, repair_s=60.0),
        policy=policy(budget, max(1, budget - 1), 10, admission=admission, over_budget=over_budget),
        weights=Weights(route=Route.FIXED, fixed_s=30.0),
        generation=Generation(tail=tail),
        steps=10,
        seed=seed,
    )
    outcome = simulate(made)
    assert outcome.staleness_max <= budget
    assert all(sum(step.ages.values()) == 10 for step in outcome.steps)
    assert 0 <= outcome.bubble_ratio <= 1
    assert 0 <= outcome.stale_share <= 1
    assert outcome.idle_cost >= 0
    assert outcome.mean_active <= count + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_under_pace_even_lengths_make_nothing_too_old_whatever_comes_and_goes(seed: int) -> None:
    outcome = simulate(replace(spot(seed), generation=Generation()))
    assert len(outcome.steps) == 40
    assert outcome.staleness_max <= 3
    assert outcome.num_redelivered > 0


def test_the_coordinator_releases_what_is_not_needed_and_calls_back_who_is_missed() -> None:
    live, all_on = simulate(spot(7)), simulate(spot(7, PoolKind.EVERYBODY))
    assert live.num_released > 0
    assert live.num_activated > 0
    assert live.mean_active < all_on.mean_active
    assert live.cost_per_step < all_on.cost_per_step
    assert live.bubble_ratio < 0.05


def test_random_workers_cost_more_than_the_cheapest_ones() -> None:
    kinds = [Kind(name=f"w{price}", count=2, rate=0.5, price_per_hour=float(price)) for price in range(1, 6)]
    costs = {}
    for kind in (PoolKind.CHEAPEST, PoolKind.RANDOM):
        costs[kind] = sum(simulate(scenario(*kinds, pool=PoolPlan(kind=kind), seed=seed)).cost_per_step for seed in range(5))
    assert costs[PoolKind.CHEAPEST] < costs[PoolKind.RANDOM]


def test_a_standby_that_is_kept_is_paid_and_costs_more_than_one_that_is_returned() -> None:
    kinds = [Kind(name="cheap", count=1, rate=3.0, price_per_hour=1.0), Kind(name="dear", count=1, rate=3.0, price_per_hour=9.0)]
    kept, returned = (
        simulate(scenario(*kinds, steps=60, warmup_steps=0, pool=PoolPlan(every_s=20.0, standby_kept=is_kept))) for is_kept in (True, False)
    )
    assert kept.num_released == returned.num_released == 1
    assert kept.mean_active == pytest.approx(2.0)
    assert returned.cost_by_kind["dear"] < kept.cost_by_kind["dear"]


def test_long_groups_are_dropped_more_often_and_downweight_keeps_them() -> None:
    made = scenario(
        Kind(name="w", count=10, rate=0.2, groups_at_once=4),
        policy=policy(budget=1, period=1, groups=40),
        generation=Generation(tail=1.2, hardness=0.8),
        steps=100,
    )
    dropping = simulate(made)
    keeping = simulate(replace(made, policy=replace(made.policy, over_budget=OverBudget.DOWNWEIGHT)))
    assert dropping.num_stale > 0
    assert dropping.bias.length < keeping.bias.length
    assert dropping.bias.difficulty < keeping.bias.difficulty <= 1.02
    assert keeping.num_stale == 0


def test_a_seed_repeats_a_simulation_and_another_one_does_not() -> None:
    made = replace(spot(3), steps=10)
    assert simulate(made) == simulate(made)
    assert simulate(made) != simulate(replace(made, seed=4))


def test_who_is_preempted_hands_over_at_once_and_who_fails_after_a_session() -> None:
    """One group of 50 s; the machine goes at some moment in it, and what it had begun is begun again."""
    told = simulate(scenario(Kind(name="w", count=3, rate=1.0, preemptions_per_day=800.0, away_s=1.0, notice_s=0.0)))
    failed = simulate(scenario(Kind(name="w", count=3, rate=1.0, failures_per_day=800.0, repair_s=1.0)))
    assert min(told.num_redelivered, failed.num_redelivered) > 0


def test_workers_that_never_finish_a_group_end_the_simulation() -> None:
    never = Kind(name="w", count=1, rate=0.001, failures_per_day=86_400.0, repair_s=1.0)
    outcome = simulate(scenario(never, steps=3))
    assert not outcome.steps
    assert outcome.bubble_ratio == 1.0
    assert math.isinf(outcome.cost_per_step)


def test_chains_stars_and_who_has_the_weights_when() -> None:
    lines = dict.fromkeys("abcd", 10000000.0)
    chains = Weights(route=Route.CHAINS, num_bytes=1e9, learner_line=20e6, chunk_bytes=100e6, load_s=5.0)
    # Two chains of two; ten chunks of 10 s each; the second of a chain one chunk later.
    assert sorted(arrivals_s(chains, lines).values()) == [105.0, 105.0, 115.0, 115.0]
    star = replace(chains, route=Route.STAR)
    assert set(arrivals_s(star, lines).values()) == {205.0}
    assert broadcast_s(chains, list(lines.values())) == 115.0
    assert broadcast_s(chains, []) == 0.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kinds": []}, "the pool is empty"),
        ({"kinds": [Kind(name="w", count=3, rate=0.0)]}, "no worker has a rate"),
        ({"kinds": [Kind(name="w", count=1, rate=1.0)] * 2}, "one name"),
        ({"steps": 0}, "at least one step"),
    ],
)
def test_what_cannot_be_simulated_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(scenario(Kind(name="w", count=1, rate=1.0)), **change)  # type: ignore[arg-type]


def test_weights_that_arrive_after_the_next_ones_are_refused() -> None:
    late = scenario(Kind(name="w", count=1, rate=1.0), weights=Weights(route=Route.FIXED, fixed_s=100.0))
    with pytest.raises(UserError, match="the next ones come before these work"):
        demand_of(late)
    with pytest.raises(UserError, match="no size"):
        Weights(route=Route.STAR)
    with pytest.raises(UserError, match="negative number"):
        Kind(name="w", count=1, rate=-1.0)
    with pytest.raises(UserError, match="correlation"):
        Generation(hardness=2.0)
