"""One plan for one budget: it keeps what it promises, and each change that it proposes is enough."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.capacity.activation import Candidate, reaches, total_rate
from echo_core.capacity.overlap import Demand
from echo_core.capacity.provisioning import Limits, advice, is_feasible, provision
from echo_schemas.errors import UserError
from tests.thorough import examples

DEMANDS = st.builds(Demand, train_s=st.floats(1.0, 1e3), broadcast_s=st.floats(0.0, 3e3), rollouts=st.integers(1, 2_000))
POOLS = st.lists(st.tuples(st.sampled_from([0.1, 0.5, 2.0]), st.sampled_from([0.0, 0.4, 3.0])), min_size=1, max_size=8).map(
    lambda pairs: [
        Candidate(worker_id=f"w{index}", kind=f"k{rate}", rate=rate, price_per_hour=price) for index, (rate, price) in enumerate(pairs)
    ]
)
BUDGETS = st.integers(1, 8)


def fleet(count: int, rate: float, price: float = 0.4, kind: str = "small") -> list[Candidate]:
    return [Candidate(worker_id=f"{kind}-{index}", kind=kind, rate=rate, price_per_hour=price) for index in range(count)]


def test_the_papers_settings_give_the_papers_period_bound_and_number_of_workers() -> None:
    paper = Demand(train_s=1631.2, broadcast_s=1437.0, rollouts=2048)
    plan = provision(paper, fleet(20, 0.2745, 0.35), Limits(budget=3, learner_price_per_hour=4 * 3.06))
    assert plan.is_feasible
    assert (plan.publication_period, len(plan.workers), plan.staleness_bound, plan.bubble_share) == (2, 9, 3, 0.0)
    assert plan.cost_per_step == pytest.approx(1631.2 * (9 * 0.35 + 4 * 3.06) / 3600)


@pytest.mark.parametrize("budget", [2, 3, 4, 6])
def test_where_weights_take_nearly_a_step_the_cheapest_period_is_the_papers_budget_less_one(budget: int) -> None:
    slow = Demand(train_s=100.0, broadcast_s=95.0, rollouts=1000)
    assert provision(slow, fleet(2000, 0.1), Limits(budget=budget)).publication_period == max(1, budget - 1)


def test_where_weights_take_no_time_every_step_is_published() -> None:
    quick = Demand(train_s=100.0, broadcast_s=0.0, rollouts=1000)
    assert provision(quick, fleet(200, 0.1), Limits(budget=6)).publication_period == 1


def test_the_advice_names_each_change_that_alone_is_enough() -> None:
    demand = Demand(train_s=100.0, broadcast_s=180.0, rollouts=100)
    plan = provision(demand, fleet(1, 2.0), Limits(budget=3))
    assert not plan.is_feasible
    assert advice(plan, demand) == (
        "11 rollouts/s are needed, and all workers together make 2. "
        "To mend it, raise the budget to 6, or add 5 workers of kind small, or let weights arrive within 90 s."
    )


def test_a_period_that_was_laid_down_is_questioned() -> None:
    demand = Demand(train_s=100.0, broadcast_s=80.0, rollouts=100)
    plan = provision(demand, fleet(1, 2.0), Limits(budget=3, publication_period=1))
    assert "publish every second step instead of every step" in advice(plan, demand)


def test_what_nothing_mends_alone_is_said_too() -> None:
    demand = Demand(train_s=1.0, broadcast_s=1e6, rollouts=1_000_000)
    assert "No single change mends it" in advice(provision(demand, fleet(1, 0.1), Limits(budget=1)), demand)


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"budget": 3, "publication_period": 5}, {"budget": 3, "gamma": 0.9}])
def test_limits_that_cannot_be_are_a_sentence(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError) as refused:
        Limits(**wrong)  # type: ignore[arg-type]
    assert refused.value.hint


@settings(max_examples=examples(200), deadline=None)
@given(DEMANDS, POOLS, BUDGETS)
def test_a_feasible_plan_is_never_below_the_target_never_waits_and_keeps_the_budget(
    demand: Demand, workers: list[Candidate], budget: int
) -> None:
    plan = provision(demand, workers, Limits(budget=budget))
    assert plan.is_feasible == is_feasible(demand, workers, Limits(budget=budget))
    if plan.is_feasible:
        assert reaches(plan.rate, plan.target)
        assert plan.staleness_bound <= budget
        assert plan.wait_s <= 1e-6 * demand.train_s * plan.publication_period
        assert plan.optimum_price_per_hour is not None
        assert plan.optimum_price_per_hour - 1e-9 <= plan.price_per_hour <= 2 * plan.optimum_price_per_hour + 1e-9
        assert advice(plan, demand) == ""
    else:
        assert total_rate(plan.workers) == pytest.approx(total_rate(workers))
        assert advice(plan, demand)


@settings(max_examples=examples(200), deadline=None)
@given(DEMANDS, POOLS, BUDGETS)
def test_whoever_follows_one_piece_of_advice_has_a_plan(demand: Demand, workers: list[Candidate], budget: int) -> None:
    limits = Limits(budget=budget)
    plan = provision(demand, workers, limits)
    helps = plan.remedies
    if helps.budget is not None:
        assert is_feasible(demand, workers, replace(limits, budget=helps.budget))
    if helps.more is not None:
        kind, count = helps.more
        rate = min(each.rate for each in workers if each.kind == kind)
        assert is_feasible(demand, [*workers, *fleet(count, rate, kind="new")], limits)
    if helps.broadcast_s is not None:
        assert is_feasible(replace(demand, broadcast_s=helps.broadcast_s * (1 - 1e-6)), workers, limits)


@settings(max_examples=examples(200), deadline=None)
@given(DEMANDS, POOLS, BUDGETS)
def test_a_larger_budget_is_never_worse(demand: Demand, workers: list[Candidate], budget: int) -> None:
    smaller, larger = (provision(demand, workers, Limits(budget=each)) for each in (budget, budget + 1))
    assert larger.is_feasible >= smaller.is_feasible
    if smaller.is_feasible and smaller.optimum_price_per_hour is not None and math.isfinite(larger.target):
        # Pools that differ by a hundredth count as equal, and the choice may be above the optimum, by twice at most.
        assert larger.price_per_hour <= 2 * 1.01 * smaller.optimum_price_per_hour + 1e-9
