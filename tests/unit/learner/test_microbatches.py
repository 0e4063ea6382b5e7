"""Properties of the plan: every sample once, whole groups per update, within the budget, the same every time. No torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_core.normalisation import UpdateSplit
from echo_learner.training.microbatches import MicroBatch, MicroBatchPlan, deal_to_ranks, plan_micro_batches, restore_plan

_GROUPS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=12)


def _cost(samples: MicroBatch, lengths: list[int]) -> int:
    inside = [lengths[sample] for sample in samples]
    return max(inside) * len(inside)


def _plan(groups: list[list[int]], num_updates: int, max_tokens: int) -> tuple[MicroBatchPlan, list[int], list[int]]:
    lengths = [length for group in groups for length in group]
    sizes = [len(group) for group in groups]
    return plan_micro_batches(lengths, sizes, num_updates=num_updates, max_tokens=max_tokens), lengths, sizes


@given(_GROUPS, st.integers(1, 12), st.integers(1, 120))
def test_every_sample_is_trained_once_and_groups_stay_in_one_update(groups: list[list[int]], num_updates: int, max_tokens: int) -> None:
    num_updates = min(num_updates, len(groups))
    plan, lengths, sizes = _plan(groups, num_updates, max_tokens)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert len(plan.updates) == num_updates
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    per_update = [{owner[sample] for samples in update for sample in samples} for update in plan.updates]
    assert sum(map(len, per_update)) == len(groups)
    counts = [len(members) for members in per_update]
    assert max(counts) - min(counts) <= 1


@given(_GROUPS, st.integers(1, 12), st.integers(1, 120))
def test_by_samples_every_sample_is_trained_once_and_no_update_is_empty(groups: list[list[int]], num_updates: int, max_tokens: int) -> None:
    num_updates = min(num_updates, len(groups))
    lengths = [length for group in groups for length in group]
    sizes = [len(group) for group in groups]
    plan = plan_micro_batches(lengths, sizes, num_updates=num_updates, max_tokens=max_tokens, split=UpdateSplit.SAMPLES)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert len(plan.updates) == num_updates
    assert all(plan.updates)
    assert restore_plan(plan.order.tolist(), plan.micro_batch_sizes.tolist(), plan.update_sizes.tolist()) == plan


@given(_GROUPS, st.integers(1, 120))
def test_a_micro_batch_keeps_the_budget_unless_one_sample_alone_breaks_it(groups: list[list[int]], max_tokens: int) -> None:
    plan, lengths, _ = _plan(groups, 1, max_tokens)
    for samples in plan.updates[0]:
        assert samples
        assert len(samples) == 1 or _cost(samples, lengths) <= max_tokens


@given(_GROUPS, st.integers(1, 3), st.integers(1, 120))
def test_a_plan_survives_the_report_and_is_the_same_every_time(groups: list[list[int]], num_updates: int, max_tokens: int) -> None:
    num_updates = min(num_updates, len(groups))
    plan, _, _ = _plan(groups, num_updates, max_tokens)
    assert restore_plan(plan.order.tolist(), plan.micro_batch_sizes.tolist(), plan.update_sizes.tolist()) == plan
    assert _plan(groups, num_updates, max_tokens)[0] == plan


@given(_GROUPS, st.integers(1, 5))
def test_all_ranks_run_equally_many_micro_batches_and_lose_none(groups: list[list[int]], num_ranks: int) -> None:
    update = _plan(groups, 1, 60)[0].updates[0]
    dealt = deal_to_ranks(update, num_ranks)
    assert len(dealt) == num_ranks
    assert len({len(rank) for rank in dealt}) == 1
    assert sorted(samples for rank in dealt for samples in rank if samples) == sorted(update)
    assert sum(1 for rank in dealt for samples in rank if not samples) < num_ranks


def test_groups_are_split_in_their_order() -> None:
    plan, _, _ = _plan([[1, 2], [9], [4, 4]], 2, 1000)
    assert plan.updates == (((1, 0),), ((2, 3, 4),))


def test_the_longest_samples_come_first_and_an_oversized_one_stands_alone() -> None:
    plan, _, _ = _plan([[5, 80, 6, 7]], 1, 20)
    assert plan.updates == (((1,), (3, 2), (0,)),)


def test_report_columns_are_int32() -> None:
    plan, _, _ = _plan([[5, 5], [7]], 2, 10)
    assert plan.order.dtype == plan.micro_batch_sizes.dtype == plan.update_sizes.dtype == "int32"
    assert plan.order.tolist() == [0, 1, 2]
    assert plan.micro_batch_sizes.tolist() == [2, 1]
    assert plan.update_sizes.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("lengths", "sizes", "num_updates", "max_tokens", "sentence"),
    [
        ([3, 4], [1], 1, 10, "do not make up 2 samples"),
        ([3], [1, 0], 1, 10, "do not make up"),
        ([3], [1], 2, 10, "1 groups cannot be split among 2 updates"),
        ([3], [1], 0, 10, "cannot be split among 0 updates"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    lengths: list[int], sizes: list[int], num_updates: int, max_tokens: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan_micro_batches(lengths, sizes, num_updates=num_updates, max_tokens=max_tokens)


@pytest.mark.parametrize(("order", "sizes", "updates"), [([0, 1], [1], [1]), ([0, 1], [2], [2]), ([0, 0], [2], [1]), ([1, 2], [2], [1])])
def test_columns_that_are_no_plan_are_refused(order: list[int], sizes: list[int], updates: list[int]) -> None:
    with pytest.raises(ValueError, match=r"fit together|every sample once"):
        restore_plan(order, sizes, updates)
