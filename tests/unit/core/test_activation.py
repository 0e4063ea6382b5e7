"""The choice of workers against the optimum, by trying every subset of small pools."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.capacity.activation import (
    Candidate,
    by_unit_price,
    cheapest_first,
    choose_optimum,
    choose_workers,
    reaches,
    total_price,
    total_rate,
)
from echo_schemas.errors import UserError
from tests.thorough import examples


def pool(*pairs: tuple[float, float]) -> list[Candidate]:
    """Of (rate, price) each."""
    return [Candidate(worker_id=f"w{index:02}", rate=rate, price_per_hour=price) for index, (rate, price) in enumerate(pairs)]


POOLS = st.lists(st.tuples(st.floats(0.05, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=8).map(lambda pairs: pool(*pairs))
SHARES = st.floats(0.01, 1.0)


def by_trying(candidates: list[Candidate], target: float) -> float:
    """The price of the cheapest subset that reaches the target."""
    subsets = (subset for size in range(len(candidates) + 1) for subset in combinations(candidates, size))
    return min(total_price(subset) for subset in subsets if reaches(total_rate(subset), target))


def test_the_cheapest_per_rollout_come_first() -> None:
    chosen = cheapest_first(pool((0.5, 1.0), (1.0, 1.0), (0.5, 0.6)), 1.4)
    assert [each.worker_id for each in chosen] == ["w01", "w02"]
    assert total_price(chosen) == pytest.approx(1.6)


def test_a_large_dear_worker_is_not_taken_for_a_small_rest() -> None:
    workers = pool((0.9, 0.9), (100.0, 150.0), (0.1, 0.3))
    assert total_price(cheapest_first(workers, 1.0)) == pytest.approx(150.9)
    assert total_price(choose_workers(workers, 1.0)) == pytest.approx(1.2)


def test_where_all_are_too_few_all_that_make_anything_work() -> None:
    workers = pool((1.0, 1.0), (0.0, 5.0), (2.0, 1.0))
    assert total_rate(cheapest_first(workers, 10.0)) == total_rate(choose_workers(workers, 10.0)) == 3.0
    assert choose_optimum(workers, 10.0) is None


def test_thirty_of_one_kind_and_eight_of_another_are_searched_through() -> None:
    chosen = choose_optimum(pool(*[(0.2, 0.4)] * 30, *[(0.5, 2.5)] * 8), 7.3)
    assert chosen is not None
    assert total_price(chosen) == pytest.approx(29 * 0.4 + 3 * 2.5)


@pytest.mark.parametrize(("rate", "price"), [(-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0), (1.0, float("inf"))])
def test_a_worker_that_cannot_be_is_a_sentence(rate: float, price: float) -> None:
    with pytest.raises(UserError):
        Candidate(worker_id="w", rate=rate, price_per_hour=price)


@settings(max_examples=examples(200))
@given(POOLS, SHARES)
def test_the_choice_reaches_the_target_for_at_most_twice_the_optimum_and_never_above_the_papers(
    workers: list[Candidate], share: float
) -> None:
    target = share * total_rate(workers)
    chosen, greedy, best = choose_workers(workers, target), cheapest_first(workers, target), by_trying(workers, target)
    assert reaches(total_rate(chosen), target)
    assert reaches(total_rate(greedy), target)
    assert total_price(chosen) <= 2 * best + 1e-9
    assert total_price(chosen) <= total_price(greedy) + 1e-9
    assert total_price(greedy) <= best + greedy[-1].price_per_hour + 1e-9


@settings(max_examples=examples(200))
@given(POOLS, SHARES)
def test_the_search_finds_what_trying_every_subset_finds(workers: list[Candidate], share: float) -> None:
    target = share * total_rate(workers)
    found = choose_optimum(workers, target)
    assert found is not None
    assert reaches(total_rate(found), target)
    assert total_price(found) == pytest.approx(by_trying(workers, target), abs=1e-6)


@settings(max_examples=examples(200))
@given(POOLS, SHARES, SHARES)
def test_a_larger_target_only_adds_to_the_papers_choice(workers: list[Candidate], one: float, other: float) -> None:
    small, large = sorted((one, other))
    fewer = cheapest_first(workers, small * total_rate(workers))
    more = cheapest_first(workers, large * total_rate(workers))
    assert more[: len(fewer)] == fewer
    assert by_unit_price(more) == more
