"""Plans of the way of weights: every worker once a stripe, and how long chains and stars take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.dissemination import Chains, Line, Lines, chain_arrivals_s, num_stripes, plan_chains, star_arrivals_s
from echo_schemas.errors import UserError
from tests.thorough import examples

MBIT = 1e6 / 8
SNAPSHOT = 16_400_000_000


def equal_lines(num_workers: int, learner_mbit: float, latency_s: float = 0.0, flow: float = float("inf")) -> Lines:
    line = Line(down=100 * MBIT, up=100 * MBIT)
    workers = {f"w{index}": line for index in range(num_workers)}
    return Lines(learner_up=learner_mbit * MBIT, workers=workers, latency_s=latency_s, flow=flow)


def chains_s(chains: Chains, lines: Lines, num_bytes: float, num_chunks: int) -> float:
    return max(chain_arrivals_s(chains, lines, num_bytes, num_chunks).values())


def star_s(workers: Sequence[str], lines: Lines, num_bytes: float) -> float:
    return max(star_arrivals_s(workers, lines, num_bytes).values())


@settings(max_examples=examples(200))
@given(st.integers(1, 40), st.integers(1, 16))
def test_every_stripe_passes_every_worker_once_and_the_ends_are_spread(num_workers: int, num_stripes: int) -> None:
    workers = [f"w{index}" for index in range(num_workers)]
    chains = plan_chains(workers, num_stripes)
    assert all(Counter(chain) == Counter(workers) for chain in chains)
    most = -(-num_stripes // num_workers)
    assert max(Counter(chain[0] for chain in chains).values()) <= most
    assert max(Counter(chain[-1] for chain in chains).values()) <= most
    if num_stripes <= num_workers:
        assert len(set(chains)) == num_stripes


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
