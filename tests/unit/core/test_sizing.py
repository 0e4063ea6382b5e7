"""The pool over time: it is short for no longer than it must be, gives back what is too much one by one, and does not flap."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.capacity.activation import Candidate, reaches, total_price, total_rate
from echo_core.capacity.sizing import PoolSizer, Resizing, SizingPolicy
from echo_schemas.errors import UserError
from tests.thorough import examples

POLICY = SizingPolicy()
QUIET = Resizing()


def worker(name: str, rate: float, price: float = 1.0) -> Candidate:
    return Candidate(worker_id=name, rate=rate, price_per_hour=price)


POOLS = st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 5.0)), min_size=1, max_size=10).map(
    lambda pairs: [worker(f"w{index}", rate, price) for index, (rate, price) in enumerate(pairs)]
)


def test_a_shortage_of_one_tick_is_none_and_one_of_two_brings_the_cheapest() -> None:
    a, b, c = worker("a", 1.2, 1.2), worker("b", 1.2, 1.3), worker("c", 0.5, 2.0)
    sizer = PoolSizer(POLICY, ["a", "b"])
    assert sizer.tick([a, c], 2.0) == QUIET
    assert sizer.tick([a, c], 2.0) == Resizing(activate=("c",))
    assert sizer.tick([a, b, c], 2.0) == QUIET
    assert sizer.tick([a, b, c], 2.0) == Resizing(activate=("b",))
    assert [sizer.tick([a, b, c], 2.0) for _ in range(5)] == [QUIET] * 4 + [Resizing(release=("c",))]
    assert sizer.active == {"a", "b"}


def test_the_dearest_go_first_one_after_another() -> None:
    workers = [worker(f"w{price}", 1.0, float(price)) for price in range(1, 7)]
    sizer = PoolSizer(POLICY, [each.worker_id for each in workers])
    released = [name for _ in range(40) for name in sizer.tick(workers, 2.0).release]
    assert released == ["w6", "w5", "w4"]


@pytest.mark.parametrize("wrong", [{"margin": -0.1}, {"short_ticks": 0}, {"surplus_ticks": 0}])
def test_a_policy_that_cannot_be_is_a_sentence(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        SizingPolicy(**wrong)  # type: ignore[arg-type]


@settings(max_examples=examples(200))
@given(POOLS, st.floats(0.01, 1.5), st.integers(0, 1023))
def test_where_nothing_changes_the_pool_settles_and_is_never_left_below_what_it_can_reach(
    workers: list[Candidate], share: float, mask: int
) -> None:
    target = share * total_rate(workers)
    sizer = PoolSizer(POLICY, [each.worker_id for index, each in enumerate(workers) if mask >> index & 1])
    released: set[str] = set()
    for tick in range(2 * POLICY.surplus_ticks * (len(workers) + 2)):
        done = sizer.tick(workers, target)
        assert not released & set(done.activate)
        assert len(done.release) <= 1
        released |= set(done.release)
        rate = total_rate(each for each in workers if each.worker_id in sizer.active)
        if tick >= POLICY.short_ticks:
            assert reaches(rate, min(target, total_rate(workers)))
    assert sizer.tick(workers, target) == QUIET


@settings(max_examples=examples(200))
@given(POOLS, st.floats(0.1, 0.9), st.integers(0, 1 << 30), st.booleans())
def test_noise_below_the_margin_calls_back_only_who_makes_the_pool_cheaper_by_the_margin(
    workers: list[Candidate], share: float, seed: int, is_worst: bool
) -> None:
    """Rates within ± e, so that (1 + e) / (1 − e) ≤ 1 + margin / 2: here e = 3.5 % and 15 %. The cause is stated at the module's head."""
    target = share * total_rate(workers)
    sizer = PoolSizer(POLICY, [each.worker_id for each in workers])
    drawn = random.Random(seed)
    for _ in range(60):
        noise = [drawn.choice([0.965, 1.035]) if is_worst else drawn.uniform(0.965, 1.035) for _ in workers]
        noisy = [worker(each.worker_id, each.rate * factor, each.price_per_hour) for each, factor in zip(workers, noise, strict=True)]
        before = price_of(workers, sizer.active)
        done = sizer.tick(noisy, target)
        # All were active, so whoever is activated was released before.
        assert not done.activate or done.replaces
        if done.replaces:
            assert price_of(workers, sizer.active - set(done.replaces)) * (1 + POLICY.margin) < before


def price_of(workers: list[Candidate], names: frozenset[str]) -> float:
    return total_price(each for each in workers if each.worker_id in names)


@settings(max_examples=examples(100))
@given(POOLS, st.lists(st.tuples(st.integers(0, 1023), st.floats(0.1, 20.0)), min_size=1, max_size=40))
def test_whatever_comes_and_goes_only_who_is_there_is_active(workers: list[Candidate], looks: list[tuple[int, float]]) -> None:
    sizer = PoolSizer(POLICY)
    for mask, target in looks:
        there = [each for index, each in enumerate(workers) if mask >> index & 1]
        before = sizer.active
        done = sizer.tick(there, target)
        assert sizer.active <= {each.worker_id for each in there}
        assert not (done.activate and done.release)
        assert not set(done.activate) & before


def test_where_the_dearest_is_needed_the_dearest_that_can_be_spared_goes() -> None:
    small, cheap, large = worker("small", 0.3, 0.2), worker("cheap", 1.0, 0.5), worker("large", 1.6, 3.0)
    sizer = PoolSizer(POLICY, ["small", "cheap", "large"])
    released = [name for _ in range(20) for name in sizer.tick([small, cheap, large], 2.0).release]
    assert released == ["small"], "without large 1.3 < 2.3, without small 2.6"


def test_several_that_became_dear_are_exchanged_together_and_then_go_one_by_one() -> None:
    """Each of the three alone would be replaced by somebody who costs more than it does."""
    dear = [worker(f"dear{number}", 0.9, 0.5) for number in range(3)]
    large = worker("large", 2.6, 2.0)
    sizer = PoolSizer(POLICY, ["dear0", "dear1", "dear2", "large"])
    assert [name for _ in range(10) for name in sizer.tick([*dear, large], 2.0).release] == ["large"]
    dear = [worker(each.worker_id, 0.9, 1.5) for each in dear]
    done = [sizer.tick([*dear, large], 2.0) for _ in range(5)]
    assert done == [QUIET] * 4 + [Resizing(activate=("large",), replaces=("dear0", "dear1", "dear2"))]
    assert [name for _ in range(20) for name in sizer.tick([*dear, large], 2.0).release] == ["dear2", "dear1", "dear0"]
    assert sizer.active == {"large"}


def test_an_exchange_is_given_up_where_those_who_came_do_not_reach_the_target() -> None:
    a, b = worker("a", 2.5, 1.0), worker("b", 2.5, 2.0)
    sizer = PoolSizer(POLICY, ["a", "b"])
    assert [name for _ in range(5) for name in sizer.tick([a, b], 2.0).release] == ["b"]
    dear = worker("a", 2.5, 5.0)
    assert [name for _ in range(5) for name in sizer.tick([dear, b], 2.0).activate] == ["b"]
    slow = worker("b", 0.5, 2.0)
    assert [name for _ in range(20) for name in sizer.tick([dear, slow], 2.0).release] == ["b"], "a is needed after all"
    assert sizer.active == {"a"}


@settings(max_examples=examples(200))
@given(POOLS, st.floats(0.1, 0.9), st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 10.0)), max_size=6))
def test_whatever_prices_do_the_pool_settles_and_is_never_left_short(
    workers: list[Candidate], share: float, moves: list[tuple[int, float]]
) -> None:
    target = share * total_rate(workers)
    sizer = PoolSizer(POLICY, [each.worker_id for each in workers])
    for index, factor in [*moves, (0, 1.0)]:
        moved = workers[index % len(workers)]
        workers = [worker(each.worker_id, each.rate, each.price_per_hour * (factor if each is moved else 1)) for each in workers]
        for _ in range(2 * POLICY.surplus_ticks * (len(workers) + 2)):
            sizer.tick(workers, target)
            assert reaches(total_rate(each for each in workers if each.worker_id in sizer.active), target)
        assert sizer.tick(workers, target) == QUIET
