"""One look at the pool at a time: who is activated or released."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.capacity.activation import Candidate, choose_optimum, reaches, total_price, total_rate
from echo_core.capacity.decision import PoolLook, PoolRule, PoolWorker, Sizing, figures_of, missing_prices
from echo_core.capacity.sizing import SizingPolicy
from echo_core.policy import StalenessPolicy
from tests.thorough import examples

POLICY = StalenessPolicy(budget=1, publication_period=1, groups_per_step=4, group_size=2)
SHORT, SURPLUS = SizingPolicy().short_ticks, SizingPolicy().surplus_ticks


class Pool:
    """A rule and workers that obey at once. With T_train = 1 s and T_bcast = 0.2 s the target is 1.1 · 8 / 0.8 = 11 rollouts/s."""

    def __init__(self, train_s: float | None = 1.0, broadcast_s: float | None = 0.2) -> None:
        self.rule = PoolRule(POLICY, SizingPolicy(), gamma=1.1)
        self.workers: dict[str, PoolWorker] = {}
        self.train_s, self.broadcast_s = train_s, broadcast_s

    def put(self, name: str, rate: float, price: float, *, is_active: bool = True) -> None:
        self.workers[name] = PoolWorker(candidate=Candidate(worker_id=name, rate=rate, price_per_hour=price), is_active=is_active)

    def look(self, times: int = 1) -> Sizing:
        for _ in range(times):
            look = PoolLook(train_s=self.train_s, broadcast_s=self.broadcast_s, workers=list(self.workers.values()))
            sizing = self.rule.decide(look)
            for name, is_active in sizing.orders.items():
                self.workers[name] = PoolWorker(candidate=self.workers[name].candidate, is_active=is_active)
        return sizing


def test_the_dearer_is_released_and_comes_back_when_the_cheap_one_dies() -> None:
    pool = Pool()
    pool.put("cheap", 20.0, 1.0)
    pool.put("dear", 20.0, 4.0)
    assert not pool.look(SURPLUS - 1).orders
    sizing = pool.look()
    assert sizing.orders == {"dear": False}
    assert sizing.reason == (
        "release dear: 20 rollouts/s without it are enough for 11, "
        "and at 4 an hour it is the dearest for what it makes of those that the cheapest choice leaves out"
    )
    assert sizing.min_rate == pytest.approx(10.0)
    assert sizing.target == pytest.approx(11.0)
    assert sizing.is_feasible
    assert not pool.look(3 * SURPLUS).orders, "the pool does not flap"
    assert pool.look().bound == 1
    cheap = pool.workers.pop("cheap")
    assert not pool.look(SHORT - 1).orders
    assert pool.look().orders == {"dear": True}
    pool.workers["cheap"] = cheap
    assert pool.look(SURPLUS).orders == {"dear": False}


def test_of_many_to_spare_one_is_released_at_a_time() -> None:
    pool = Pool()
    for number in range(5):
        pool.put(f"w{number}", 20.0, 1.0 + number)
    released = [tuple(pool.look().orders) for _ in range(4 * SURPLUS)]
    assert [each for each in released if each] == [("w4",), ("w3",), ("w2",), ("w1",)]


def test_before_a_step_is_known_everybody_works() -> None:
    pool = Pool(train_s=None, broadcast_s=None)
    pool.put("a", 20.0, 1.0)
    pool.put("b", 0.0, 1.0, is_active=False)
    assert pool.look().orders == {"b": True}
    assert pool.look().target is None


def test_before_the_way_of_the_weights_is_known_nobody_is_released_and_shortages_are_mended() -> None:
    pool = Pool(broadcast_s=None)
    pool.put("a", 20.0, 1.0)
    pool.put("b", 20.0, 2.0)
    assert not pool.look(4 * SURPLUS).orders
    pool.put("a", 2.0, 1.0)
    pool.put("b", 20.0, 2.0, is_active=False)
    assert pool.look(SHORT).orders == {"b": True}
    pool.put("a", 20.0, 1.0)
    pool.broadcast_s = 0.2
    assert pool.look(SURPLUS).orders == {"b": False}, "what was held back is done once it is known"


def test_whoever_is_not_measured_works_on_and_counts_for_nothing() -> None:
    pool = Pool()
    pool.put("a", 20.0, 1.0)
    pool.put("new", 0.0, 9.0)
    assert not pool.look(4 * SURPLUS).orders
    pool.put("new", 20.0, 9.0)
    assert pool.look(SURPLUS).orders == {"new": False}


def test_a_pool_that_is_too_small_has_everybody_active_and_says_what_would_help() -> None:
    pool = Pool()
    pool.put("a", 4.0, 1.0)
    pool.put("b", 2.0, 1.0, is_active=False)
    pool.put("unmeasured", 0.0, 1.0, is_active=False)
    sizing = pool.look()
    assert sizing.is_feasible is False
    assert "11 rollouts/s are needed, and all workers together make 6." in sizing.advice
    assert pool.look().orders == {"b": True}
    assert pool.look().orders == {"unmeasured": True}, "last of all, whoever may be worth something"
    assert not pool.look(3 * SURPLUS).orders


def test_weights_that_come_too_late_are_infeasible_for_any_pool() -> None:
    pool = Pool(broadcast_s=1.5)
    pool.put("a", 400.0, 1.0)
    pool.put("b", 400.0, 1.0, is_active=False)
    assert pool.look(SHORT).orders == {"b": True}
    assert "the next ones come before these work" in pool.look().advice


def test_the_figures_of_a_decision_are_those_it_went_by_and_what_the_pool_costs_after_it() -> None:
    pool = Pool()
    pool.put("cheap", 20.0, 1.0)
    pool.put("dear", 20.0, 4.0)
    pool.look(SURPLUS - 1)
    look = PoolLook(train_s=1.0, broadcast_s=0.2, workers=list(pool.workers.values()))
    assert figures_of(look, pool.rule.decide(look)) == {
        "train_s": 1.0,
        "broadcast_s": 0.2,
        "min_rate": pytest.approx(10.0),
        "target_rate": pytest.approx(11.0),
        "rate": 40.0,
        "active": 1.0,
        "price_active": 1.0,
        "price_standby": 4.0,
    }


def test_what_is_infinite_or_not_known_is_no_figure() -> None:
    pool = Pool(broadcast_s=1.5)
    pool.put("a", 20.0, 1.0)
    look = PoolLook(train_s=1.0, broadcast_s=1.5, workers=list(pool.workers.values()))
    assert not {"min_rate", "target_rate"} & figures_of(look, pool.rule.decide(look)).keys()
    assert "train_s" not in figures_of(PoolLook(train_s=None, broadcast_s=None, workers=()), Sizing())


def test_missing_prices_are_said_with_what_follows() -> None:
    def workers(*prices: float) -> list[PoolWorker]:
        return [
            PoolWorker(candidate=Candidate(worker_id=f"w{number}", rate=1.0, price_per_hour=price), is_active=True)
            for number, price in enumerate(prices)
        ]

    assert not missing_prices(workers(1.0, 2.0))
    assert not missing_prices(workers(0.0)), "of one there is nothing to choose"
    assert "w1 count as free and are released last" in missing_prices(workers(1.0, 0.0))
    assert "the slowest are released first" in missing_prices(workers(0.0, 0.0))
    assert "and 3 more" in missing_prices(workers(*[0.0] * 8, 1.0))


def test_a_price_that_rises_has_others_take_its_place_and_then_it_is_released() -> None:
    pool = Pool()
    pool.put("spot", 20.0, 0.5)
    pool.put("server", 20.0, 2.0)
    assert pool.look(SURPLUS).orders == {"server": False}
    pool.put("spot", 20.0, 2.2)
    assert not pool.look(3 * SURPLUS).orders, "less than the margin dearer"
    pool.put("spot", 20.0, 5.0)
    assert not pool.look(SURPLUS - 1).orders
    sizing = pool.look()
    assert sizing.orders == {"server": True}
    assert sizing.reason == "activate server: they can do the work of spot for less, which is then released"
    assert not pool.look(SURPLUS - 1).orders
    assert pool.look().orders == {"spot": False}
    assert not pool.look(5 * SURPLUS).orders, "the pool does not flap"


NUMBERS = st.tuples(st.floats(0.5, 30.0), st.floats(0.0, 5.0))
EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "die", "slow", "price"]), st.integers(0, 7), NUMBERS, st.integers(0, 3 * SURPLUS)), max_size=10
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=8), EVENTS)
def test_whoever_joins_dies_slows_down_or_changes_its_price_the_pool_is_soon_enough_comes_to_rest_and_is_cheap_then(
    workers: list[tuple[float, float]], events: list[tuple[str, int, tuple[float, float], int]]
) -> None:
    pool, goal = Pool(), 11.0 * (1 + SizingPolicy().margin)
    for number, (rate, price) in enumerate(workers):
        pool.put(f"w{number}", rate, price)
    num_short = 0
    for number, (kind, which, (rate, price), wait) in enumerate(
        [*events, ("price", 0, (1.0, 1.0), 2 * SURPLUS * (len(workers) + len(events) + 4))]
    ):
        names = sorted(pool.workers)
        if kind == "join":
            pool.put(f"new{number}", rate, price)
        elif names:
            name = names[which % len(names)]
            held = pool.workers[name]
            if kind == "die":
                del pool.workers[name]
            elif kind == "slow":
                pool.put(name, held.candidate.rate / (1 + rate / 10), held.candidate.price_per_hour, is_active=held.is_active)
            else:
                pool.put(name, held.candidate.rate, price, is_active=held.is_active)
        changes: dict[str, int] = {}
        for _ in range(wait):
            for name in pool.look().orders:
                changes[name] = changes.get(name, 0) + 1
            everybody = [each.candidate for each in pool.workers.values()]
            is_short = not reaches(total_rate(active_of(pool)), 11.0) and reaches(total_rate(everybody), 11.0)
            num_short = num_short + 1 if is_short else 0
            assert num_short < SHORT, "short although there is a choice"
        assert max(changes.values(), default=0) <= 2, "while nothing changed somebody went and came again and again"
    assert not pool.look(2 * SURPLUS).orders, "the pool is at rest"
    cheapest = choose_optimum([each.candidate for each in pool.workers.values()], goal)
    if cheapest is not None:
        assert total_price(active_of(pool)) <= 2 * (1 + SizingPolicy().margin) * total_price(cheapest) + 1e-9


def active_of(pool: Pool) -> list[Candidate]:
    return [each.candidate for each in pool.workers.values() if each.is_active]
