"""Plans of the way of weights: every worker once a stripe, one child at most, and a repair that asks the old parent."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.dissemination import Line, Lines, Relink, StripedChains, chains_s, num_stripes, plan_chains, star_s
from echo_schemas.errors import UserError
from tests.thorough import examples

MBIT = 1e6 / 8
SNAPSHOT = 16_400_000_000


def equal_lines(num_workers: int, learner_mbit: float, latency_s: float = 0.0, flow: float = float("inf")) -> Lines:
    line = Line(down=100 * MBIT, up=100 * MBIT)
    workers = {f"w{index}": line for index in range(num_workers)}
    return Lines(learner_up=learner_mbit * MBIT, workers=workers, latency_s=latency_s, flow=flow)


def hold(plan: StripedChains, workers: set[str]) -> None:
    """What every plan keeps."""
    for stripe, chain in enumerate(plan.chains):
        assert Counter(chain) == Counter(workers)
        parents = Counter(plan.parent(stripe, worker) for worker in chain)
        assert all(count == 1 for count in parents.values())
        for worker in chain:
            child = plan.child(stripe, worker)
            assert child is None or plan.parent(stripe, child) == worker


def test_a_worker_that_leaves_is_replaced_by_its_parent() -> None:
    plan, links = plan_chains(["a", "b", "c"], 3).without("b")
    assert plan.chains == (("a", "c"), ("c", "a"), ("c", "a"))
    assert links == (Relink(stripe=0, child="c", parent="a"), Relink(stripe=1, child="c", parent=None))


def test_a_worker_that_joins_is_the_last_everywhere() -> None:
    plan, links = plan_chains(["a", "b"], 2).joined("c")
    assert plan.chains == (("a", "b", "c"), ("b", "a", "c"))
    assert [(link.child, link.parent) for link in links] == [("c", "b"), ("c", "a")]
    with pytest.raises(UserError):
        plan.joined("c")


@pytest.mark.parametrize("chains", [(), (("a", "b"), ("a",)), (("a", "a"),), (("a",), ("b",))])
def test_chains_that_miss_somebody_are_none(chains: tuple[tuple[str, ...], ...]) -> None:
    with pytest.raises(UserError):
        StripedChains(chains)


@settings(max_examples=examples(200))
@given(st.integers(1, 40), st.integers(1, 16))
def test_every_stripe_passes_every_worker_once_and_the_ends_are_spread(num_workers: int, num_stripes: int) -> None:
    workers = [f"w{index}" for index in range(num_workers)]
    plan = plan_chains(workers, num_stripes)
    hold(plan, set(workers))
    most = -(-num_stripes // num_workers)
    assert max(Counter(chain[0] for chain in plan.chains).values()) <= most
    assert max(Counter(chain[-1] for chain in plan.chains).values()) <= most
    if num_stripes <= num_workers:
        assert len(set(plan.chains)) == num_stripes


@settings(max_examples=examples(100))
@given(st.integers(2, 8), st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=20))
def test_after_any_comings_and_goings_the_links_that_were_changed_make_the_new_plan(
    num_workers: int, num_stripes: int, turns: list[tuple[bool, int]]
) -> None:
    plan = plan_chains([f"w{index}" for index in range(num_workers)], num_stripes)
    parents = {(stripe, worker): plan.parent(stripe, worker) for stripe in range(num_stripes) for worker in plan.workers}
    for number, (is_leaving, which) in enumerate(turns):
        if is_leaving:
            if len(plan.workers) < 2:
                continue
            gone = sorted(plan.workers)[which % len(plan.workers)]
            plan, links = plan.without(gone)
            parents = {key: parent for key, parent in parents.items() if key[1] != gone}
        else:
            plan, links = plan.joined(f"n{number}")
        assert len(links) <= num_stripes
        parents.update({(link.stripe, link.child): link.parent for link in links})
        hold(plan, set(plan.workers))
        assert parents == {(stripe, worker): plan.parent(stripe, worker) for stripe in range(num_stripes) for worker in plan.workers}


def test_chains_take_about_as_long_for_eighteen_workers_as_for_nine_and_a_star_twice_as_long() -> None:
    nine, eighteen = equal_lines(9, 300), equal_lines(18, 300)
    assert chains_s(plan_chains(list(nine.workers), 1), nine, SNAPSHOT, 164) == pytest.approx(1376)
    assert chains_s(plan_chains(list(eighteen.workers), 1), eighteen, SNAPSHOT, 164) == pytest.approx(1448)
    assert star_s(list(nine.workers), nine, SNAPSHOT) == pytest.approx(3936)
    assert star_s(list(eighteen.workers), eighteen, SNAPSHOT) == pytest.approx(7872)
    wide = equal_lines(9, 1000)
    assert star_s(list(wide.workers), wide, SNAPSHOT) == pytest.approx(1312)


def test_stripes_help_where_one_flow_does_not_fill_the_line() -> None:
    far = equal_lines(4, 300, flow=25 * MBIT)
    names = list(far.workers)
    alone, four = (chains_s(plan_chains(names, stripes), far, SNAPSHOT, 200) for stripes in (1, 4))
    assert alone == pytest.approx(4 * four)


@settings(max_examples=examples(100))
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 50), st.floats(0.0, 0.5))
def test_no_plan_is_quicker_than_a_line_and_smaller_chunks_help(stripes: int, num_workers: int, chunks: int, latency_s: float) -> None:
    lines = equal_lines(num_workers, 300, latency_s)
    names = list(lines.workers)
    taken_s = chains_s(plan_chains(names, stripes), lines, SNAPSHOT, chunks)
    assert taken_s >= SNAPSHOT / (100 * MBIT) - 1e-6
    assert chains_s(plan_chains(names, stripes), lines, SNAPSHOT, 2 * chunks) <= taken_s + 1e-6
    assert star_s(names, lines, SNAPSHOT) >= SNAPSHOT / (100 * MBIT) - 1e-6


def test_a_line_that_carries_nothing_is_a_sentence() -> None:
    with pytest.raises(UserError):
        Lines(learner_up=0.0, workers={})
    with pytest.raises(UserError):
        plan_chains(["a"], 0)


def test_a_small_snapshot_is_cut_into_few_stripes() -> None:
    assert [num_stripes(72, workers) for workers in (1, 2, 4, 8)] == [1, 2, 4, 2]
    assert num_stripes(18_000, 9) == 9
    assert num_stripes(0, 5) == num_stripes(3, 1000) == 1
