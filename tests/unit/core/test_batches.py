"""Choice of batch, advantages, normalisation, closed seqs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from echo_core.advantages import AdvantageScale, group_advantages, has_signal, total_reward
from echo_core.batch_choice import choose_batch
from echo_core.closed_seqs import ClosedSeqs
from echo_core.groups import Member, ReadyGroup, Score
from echo_core.normalisation import Normalisation, UpdateSplit, sequence_scales, split_samples
from echo_core.policy import OverBudget, StalenessPolicy
from echo_schemas.records import DropReason, LogprobSource, RewardTerm, TrajectorySource
from tests.unit.core.records import EXACT, at, trajectory


def policy(**changes: object) -> StalenessPolicy:
    values = {"budget": 2, "publication_period": 1, "groups_per_step": 2, "group_size": 2, "min_group_size": 2, **changes}
    return StalenessPolicy(**values)  # type: ignore[arg-type]


def group(seq: int, *versions: int, scored: bool = True) -> ReadyGroup:
    scores = {"exact": Score(value=1.0)} if scored else {}
    members = tuple(
        Member(where=at(100 * seq + index), trajectory=trajectory(seq, index, version=version), scores=scores)
        for index, version in enumerate(versions)
    )
    return ReadyGroup(seq=seq, attempt="a", members=members)


def test_the_oldest_admissible_groups_make_the_batch() -> None:
    choice = choose_batch([group(9, 5, 5), group(2, 4, 4), group(1, 5, 5)], 5, policy())
    assert choice.batch is not None
    assert [chosen.seq for chosen in choice.batch] == [2, 1]
    assert not choice.refused


@pytest.mark.parametrize("version", [0, 5, 900])
def test_an_offline_group_is_admissible_whatever_version_it_names(version: int) -> None:
    offline = {"source": TrajectorySource.OFFLINE, "logprob_source": LogprobSource.RECOMPUTED}
    members = tuple(
        Member(where=at(index), trajectory=trajectory(7, index, version=version, **offline), scores={"exact": Score(value=1.0)})
        for index in range(2)
    )
    choice = choose_batch([ReadyGroup(seq=7, attempt="a", members=members)], 5, policy(groups_per_step=1, budget=0))
    assert choice.batch is not None
    assert [(sample.staleness, sample.weight) for sample in choice.batch[0].samples] == [(0, 1.0), (0, 1.0)]
    assert not choice.refused


@given(st.permutations(range(6)))
def test_the_choice_does_not_depend_on_arrival(order: list[int]) -> None:
    ready = [group(seq, 3 + seq % 3, 5) for seq in range(6)]
    choice = choose_batch([ready[place] for place in order], 5, policy())
    assert choice == choose_batch(ready, 5, policy())


def test_too_few_groups_are_no_batch() -> None:
    choice = choose_batch([group(1, 5, 5)], 5, policy())
    assert choice.batch is None


def test_drop_removes_single_samples_and_refuses_what_is_left_too_small() -> None:
    rules = policy(groups_per_step=1, group_size=3)
    kept = choose_batch([group(1, 2, 5, 5)], 5, rules)
    assert kept.batch is not None
    assert kept.batch[0].dropped == {at(100): DropReason.STALE}
    assert len(kept.batch[0].samples) == 2
    refused = choose_batch([group(1, 2, 2, 5)], 5, rules)
    assert (refused.batch, refused.refused) == (None, {1: DropReason.STALE})


def test_withheld_samples_stay_in_the_baseline_without_weight() -> None:
    rules = policy(groups_per_step=1, group_size=3, over_budget=OverBudget.WITHHOLD)
    choice = choose_batch([group(1, 2, 5, 5)], 5, rules)
    assert choice.batch is not None
    assert [sample.weight for sample in choice.batch[0].samples] == [0.0, 1.0, 1.0]
    assert not choice.batch[0].dropped


def test_downweighted_samples_fade_with_age() -> None:
    rules = policy(groups_per_step=1, group_size=3, over_budget=OverBudget.DOWNWEIGHT)
    choice = choose_batch([group(1, 1, 5, 5)], 5, rules)
    assert choice.batch is not None
    assert [(sample.staleness, sample.weight) for sample in choice.batch[0].samples] == [(4, 0.5), (0, 1.0), (0, 1.0)]


@pytest.mark.parametrize("over_budget", list(OverBudget))
def test_what_is_not_this_runs_past_is_never_trained(over_budget: OverBudget) -> None:
    choice = choose_batch([group(1, 6, 6)], 5, policy(groups_per_step=1, over_budget=over_budget))
    assert choice.refused == {1: DropReason.NOT_THIS_PAST}


def test_a_sample_without_a_required_reward_is_left_out() -> None:
    choice = choose_batch([group(1, 5, 5, scored=False)], 5, policy(groups_per_step=1), EXACT)
    assert choice.refused == {1: DropReason.UNREWARDED}


@given(arrays.arrays(np.float64, st.integers(2, 16), elements=st.floats(-10, 10)))
def test_advantages_are_centred_and_ordered_as_rewards_are(rewards: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    advantages = group_advantages(rewards)
    assert abs(advantages.sum()) < 1e-6
    assert np.isfinite(advantages).all()
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= -1e-9).all()
    assert has_signal(rewards) == bool(advantages.any())


def test_equal_rewards_give_exactly_zero() -> None:
    assert not group_advantages(np.full(5, 0.1)).any()


def test_scaling_by_the_deviation_is_optional() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    assert group_advantages(rewards, scale=AdvantageScale.NONE).tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert group_advantages(rewards).tolist() == pytest.approx([-1, 1, 1, -1], abs=1e-5)


def test_the_samples_deviation_makes_advantages_smaller_by_the_group_s_size() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0, 0.75])
    population, sample = group_advantages(rewards), group_advantages(rewards, scale=AdvantageScale.SAMPLE)
    assert sample.tolist() == pytest.approx((population * np.sqrt(7 / 8)).tolist(), rel=1e-5)
    assert sample.tolist() == pytest.approx(((rewards - rewards.mean()) / (np.std(rewards, ddof=1) + 1e-6)).tolist())
    pair = np.array([0.0, 1.0])
    assert group_advantages(pair, scale=AdvantageScale.SAMPLE).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


def test_the_reward_is_the_weighted_sum_of_what_is_in_force() -> None:
    terms = (*EXACT, RewardTerm(name="brevity", weight=0.5, required=False, default=-1.0))
    assert total_reward({"exact": 1.0, "brevity": 0.4, "shadow": 100.0}, terms) == pytest.approx(1.2)
    assert total_reward({"exact": 1.0}, terms) == pytest.approx(0.5)
    with pytest.raises(KeyError, match="exact"):
        total_reward({}, terms)


lengths = arrays.arrays(np.int64, st.integers(1, 12), elements=st.integers(1, 50))


@given(lengths)
def test_equal_token_losses_give_that_loss_under_sequence_and_token(
    num_tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    for kind in (Normalisation.SEQUENCE, Normalisation.TOKEN):
        assert (sequence_scales(num_tokens, kind) * num_tokens).sum() == pytest.approx(1.0)


def test_the_three_normalisations() -> None:
    num_tokens = np.array([1, 3], dtype=np.int64)
    assert sequence_scales(num_tokens, Normalisation.SEQUENCE).tolist() == pytest.approx([1 / 2, 1 / 6])
    assert sequence_scales(num_tokens, Normalisation.TOKEN).tolist() == pytest.approx([1 / 4, 1 / 4])
    assert sequence_scales(num_tokens, Normalisation.CONSTANT, constant=10).tolist() == pytest.approx([1 / 20, 1 / 20])
    with pytest.raises(ValueError, match="needs its number"):
        sequence_scales(num_tokens, Normalisation.CONSTANT)
    with pytest.raises(ValueError, match="without response tokens"):
        sequence_scales(np.zeros(2, dtype=np.int64), Normalisation.TOKEN)


@given(st.integers(1, 64), st.integers(1, 8))
def test_updates_share_the_groups_without_overlap_or_rest(num_groups: int, num_updates: int) -> None:
    if num_updates > num_groups:
        with pytest.raises(ValueError, match="cannot be split"):
            split_samples([1] * num_groups, num_updates)
        return
    # A group of one sample each: the samples are the groups.
    parts = split_samples([1] * num_groups, num_updates)
    assert [index for part in parts for index in part] == list(range(num_groups))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_every_group_is_in_every_update_as_far_as_its_samples_reach(sizes: list[int], num_updates: int) -> None:
    num_updates = min(num_updates, len(sizes))
    parts = split_samples(sizes, num_updates, UpdateSplit.SAMPLES)
    assert sorted(index for part in parts for index in part) == list(range(sum(sizes)))
    assert all(parts)
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    for group, size in enumerate(sizes):
        shares = [sum(owner[index] == group for index in part) for part in parts]
        assert max(shares) - min(shares) <= 1
        assert sum(shares) == size


def test_two_groups_of_four_split_both_ways() -> None:
    assert split_samples([4, 4], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split_samples([4, 4], 2, UpdateSplit.SAMPLES) == [[0, 2, 5, 7], [1, 3, 4, 6]]


@given(st.lists(st.integers(0, 30)), st.integers(0, 5))
def test_closed_seqs_are_a_set_with_little_memory(seqs: list[int], floor: int) -> None:
    closed = ClosedSeqs(floor)
    model = set(range(floor))
    for seq in seqs:
        assert closed.close(seq) == (seq not in model)
        model.add(seq)
    assert {seq for seq in range(40) if seq in closed} == model
    assert closed.floor not in closed
    restored = ClosedSeqs(closed.floor, closed.above)
    assert {seq for seq in range(40) if seq in restored} == model
