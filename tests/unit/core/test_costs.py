"""Prices become money: between two heartbeats, by kind, over step reports."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_core.capacity.costs import NOTHING, Bill, CostMeter, Spending, spending
from echo_schemas.records import KindCost, StepReport, WorkerState, WorkerStatus
from echo_schemas.topics import STEPS
from tests.examples import load_examples


def word(
    name: str = "w", *, busy_s: float = 0.0, price: float = 3.6, state: WorkerState = WorkerState.READY, kind: str = "k"
) -> WorkerStatus:
    return WorkerStatus(
        run_id="r", worker_id=name, host="h", engine="e", state=state, busy_s=busy_s, price_per_hour=price, kind=kind, time_ms=0
    )  # fmt: skip


def report(**changes: object) -> StepReport:
    (made,) = itertools.islice((each for each in load_examples(STEPS).values() if isinstance(each, StepReport)), 1)
    return replace(made, **{"costs": (), "learner_cost": 0.0, "staleness_total": (8,), **changes})  # type: ignore[arg-type]


def test_time_with_a_group_is_busy_and_the_rest_is_idle() -> None:
    spent = spending(word(busy_s=100.0), word(busy_s=108.0), 10.0)
    assert [spent.busy, spent.idle, spent.standby] == pytest.approx([0.008, 0.002, 0.0])


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING])
def test_a_start_and_an_end_are_paid_as_idle(state: WorkerState) -> None:
    assert spending(word(state=state), word(), 10.0) == Spending(idle=0.01)


def test_standby_is_paid_and_told_apart() -> None:
    assert spending(word(state=WorkerState.STANDBY), word(state=WorkerState.READY), 10.0) == Spending(standby=0.01)


def test_what_is_gone_silent_or_without_a_number_is_not_paid() -> None:
    assert spending(word(state=WorkerState.GONE), word(), 10.0) == NOTHING
    assert spending(word(), word(), 100.0) == NOTHING
    assert spending(word(), word(), -1.0) == NOTHING
    assert spending(word(price=float("nan")), word(), 1.0) == NOTHING
    assert spending(word(price=float("inf")), word(), 1.0) == NOTHING


def test_a_process_that_was_started_anew_counts_its_busy_time_from_zero() -> None:
    assert spending(word(busy_s=500.0), word(busy_s=4.0), 10.0).busy == pytest.approx(0.004)


@given(st.floats(0, 1e6), st.floats(0, 1e6) | st.just(float("inf")), st.floats(0.001, 60), st.floats(0, 1000), st.sampled_from(WorkerState))
def test_the_parts_are_never_negative_and_never_above_price_times_time(
    before_s: float, after_s: float, seconds: float, price: float, state: WorkerState
) -> None:
    spent = spending(word(busy_s=before_s, price=price, state=state), word(busy_s=after_s), seconds)
    assert min(spent.busy, spent.idle, spent.standby) >= 0
    assert spent.total == pytest.approx(0.0 if state is WorkerState.GONE else price * seconds / 3600)


def test_a_meter_sums_by_kind_and_begins_anew_with_each_report() -> None:
    meter = CostMeter()
    for tick in range(11):
        meter.hear(word("a", kind="dear", busy_s=float(tick), price=7.2), float(tick))
        meter.hear(word("b", kind="cheap", price=0.72), float(tick))
        meter.hear(word("c", kind="cheap", price=0.72, state=WorkerState.STANDBY), float(tick))
    cheap, dear = meter.take()
    assert [(each.kind, each.num_workers) for each in (cheap, dear)] == [("cheap", 2), ("dear", 1)]
    assert [dear.busy, dear.idle, cheap.idle, cheap.standby] == pytest.approx([0.02, 0.0, 0.002, 0.002])
    assert meter.take() == ()


def test_the_price_of_a_stretch_is_the_one_it_began_with() -> None:
    meter = CostMeter()
    for tick, price in enumerate((3.6, 36.0, 36.0)):
        meter.hear(word(price=price), float(tick))
    assert meter.take()[0].idle == pytest.approx(0.011)


def test_without_prices_there_is_no_cost() -> None:
    meter = CostMeter()
    meter.hear(word(price=0.0), 0.0)
    meter.hear(word(price=0.0), 1.0)
    assert meter.take() == ()


def test_names_that_somebody_invents_do_not_pile_up() -> None:
    meter = CostMeter()
    for number in range(10_500):
        meter.hear(word(f"w{number}"), 0.0)
    assert len(meter._heard) == 10_000


def test_a_bill_is_the_sum_of_the_reports_and_a_step_is_its_mean_without_the_start() -> None:
    bill = Bill()
    assert (bill.per_step, bill.per_1000, bill.total) == (None, None, 0)
    costs = (KindCost(kind="a", num_workers=1, busy=0.015, idle=0.01), KindCost(kind="b", num_workers=1, standby=0.005))
    bill.add(report(costs=costs, learner_cost=1.01))
    assert bill.per_step == pytest.approx(1.04)
    for _ in range(2):
        bill.add(report(costs=costs, learner_cost=0.01))
    assert bill.per_step == pytest.approx(0.04)
    assert bill.total == pytest.approx(1.12)
    assert bill.per_1000 == pytest.approx(1000 * 1.12 / 24)
    assert bill.workers.idle == pytest.approx(0.03)
    assert bill.kinds["b"].standby == pytest.approx(0.015)
