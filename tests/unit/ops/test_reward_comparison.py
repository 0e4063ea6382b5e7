"""What two rewards say of the same samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_ops.rewards.comparison import compare
from echo_ops.viewer.rewards import rewards_page
from echo_schemas.records import Reward
from tests.unit.core.records import at
from tests.unit.ops.reward_records import failed, scored


def column(name: str, values: list[float], *, group_size: int = 4) -> list[Reward]:
    found = []
    for number, value in enumerate(values):
        seq = number // group_size
        found.append(replace(scored(name, at(number), value=value), seq=seq, group_id=f"demo/{seq}", index=number % group_size))
    return found


def test_a_reward_agrees_with_itself() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    found = compare(column("a", values), column("b", values))
    assert found is not None
    assert (found.num_matched, found.num_groups) == (8, 2)
    assert (found.pearson, found.spearman, found.kappa, found.rank_within) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert (found.mae, found.flipped, found.flat_a, found.flat_b, found.flat_either) == (0.0, 0.0, 0.5, 0.5, 0.5)
    assert found.confusion == (6, 0, 0, 2)


def test_signs_that_flip_are_counted_where_both_have_one() -> None:
    found = compare(column("a", [1.0, 0.0, 0.0, 1.0]), column("b", [0.5, 0.1, 0.5, 0.1]))
    assert found is not None
    assert found.flipped == 0.5
    assert found.confusion is None
    assert found.kappa is None
    assert found.rank_within == pytest.approx(0.0)


def test_only_samples_with_both_values_are_matched_and_the_first_value_counts() -> None:
    a = [*column("a", [1.0, 0.0, 1.0]), scored("a", at(0), value=0.0)]
    b = [*column("b", [1.0, 1.0])[1:], failed("b", at(2), "KeyError")]
    found = compare(a, b)
    assert found is not None
    assert (found.num_matched, found.num_a, found.num_b, found.num_groups) == (1, 3, 1, 0)
    assert (found.pearson, found.flipped, found.flat_either) == (None, None, None)
    assert compare(a, []) is None


def test_equal_values_share_their_rank() -> None:
    found = compare(column("a", [1.0, 2.0, 2.0, 3.0]), column("b", [1.0, 20.0, 20.0, 300.0]))
    assert found is not None
    assert found.spearman == pytest.approx(1.0)
    assert found.pearson is not None
    assert found.pearson < 0.9


def test_a_reward_whose_older_records_were_not_read_covers_all_that_it_has_reached() -> None:
    """`a` is written before `b`, so that among the newest records are some of `b` whose `a` is older; `c` scores every other sample."""
    a, b, c = (column(name, [0.5] * 12) for name in "abc")
    page = rewards_page([], [*a[4:], *b, *c[1::2]], [], None, ("", ""))
    said = {each["name"]: (each["coverage"], each["num_judged"]) for each in page["values"]}
    assert said == {"a": (1.0, 8), "b": (1.0, 12), "c": (pytest.approx(6 / 11), 11)}
