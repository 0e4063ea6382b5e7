"""From chosen groups to a batch: where each token lands, what it counts, and what the report remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from echo_core.advantages import AdvantageScale
from echo_core.batch_choice import ChosenGroup, ChosenSample
from echo_core.groups import Member, Score
from echo_learner.training.batch import BatchRules, FormedBatch, expert_rows, form_batch
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE, VALUE_DTYPE, pack_logprobs, pack_tokens
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.records import Experts, RewardTerm, Span, Trajectory, VersionSpan
from tests.unit.core.records import EXACT, at, trajectory

RULES = BatchRules(num_updates=1, micro_batch_tokens=1_000)


@dataclass(frozen=True)
class Signals:
    mask: Any = None
    weights: Any = None


@dataclass
class FakeTask:
    """Signals by the trajectory's index."""

    answers: Mapping[int, Signals] = field(default_factory=dict)

    def signals(self, trajectory: Trajectory, /) -> Signals:
        return self.answers.get(trajectory.index, Signals())


def two_turns(seq: int, index: int) -> Trajectory:
    """Seven tokens: prompt, two generated, one of the environment, two generated, one more of the environment."""
    return trajectory(
        seq,
        index,
        token_ids=pack_tokens([10 * seq + index, 1, 2, 3, 4, 5, 6]),
        generated=(Span(start=1, end=3), Span(start=4, end=6)),
        version_spans=(VersionSpan(start=1, end=3, version=2), VersionSpan(start=4, end=6, version=3)),
        logprobs=pack_logprobs([-1.0, -2.0, -3.0, -4.0]),
        min_version=2,
        max_version=3,
    )


def group(*members: Trajectory, values: tuple[float, ...], weights: tuple[float, ...] | None = None) -> ChosenGroup:
    return ChosenGroup(
        seq=members[0].seq,
        samples=tuple(
            ChosenSample(
                member=Member(
                    where=at(100 * member.seq + member.index, partition=member.seq), trajectory=member, scores={"exact": Score(value=value)}
                ),
                staleness=0,
                weight=weight,
            )
            for member, value, weight in zip(members, values, weights or (1.0,) * len(members), strict=True)
        ),
        dropped={},
    )


def formed(task: FakeTask | None = None, rules: BatchRules = RULES, weights: tuple[float, ...] | None = None) -> FormedBatch:
    """Two groups: one of single answers, one of two turns whose rewards are all the same."""
    single = group(trajectory(0, 0, version=4), trajectory(0, 1, version=3), values=(0.0, 1.0), weights=weights)
    double = group(two_turns(1, 0), two_turns(1, 1), values=(5.0, 5.0))
    return form_batch((single, double), 4, EXACT, rules, task or FakeTask())


def test_tokens_and_generated_rows_lie_sample_after_sample() -> None:
    batch = formed().training
    assert batch.lengths.tolist() == [3, 3, 7, 7]
    assert batch.num_generated.tolist() == [2, 2, 4, 4]
    assert batch.tokens[:3].tolist() == [1, 2, 3]
    assert batch.tokens[6:13].tolist() == [10, 1, 2, 3, 4, 5, 6]
    assert batch.generated[:6].tolist() == [False, True, True] * 2
    assert batch.generated[6:13].tolist() == [False, True, True, False, True, True, False]
    assert batch.sampler[4:8].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert batch.generated.sum() == len(batch.sampler) == len(batch.mask) == len(batch.advantages) == 12


def test_only_samples_wholly_of_the_batchs_version_are_fresh() -> None:
    assert formed().training.fresh.tolist() == [True] * 2 + [False] * 10


def test_advantages_are_relative_within_the_group_and_one_for_all_tokens_of_a_sample() -> None:
    batch = formed()
    assert batch.training.advantages.tolist() == pytest.approx([-1, -1, 1, 1] + [0] * 8, abs=1e-5)
    assert batch.groups_without_signal == 1
    unscaled = form_batch(
        (group(trajectory(0, 0), trajectory(0, 1), values=(0.0, 1.0)),),
        0,
        EXACT,
        BatchRules(num_updates=1, micro_batch_tokens=9, scale=AdvantageScale.NONE),
        FakeTask(),
    )
    assert unscaled.training.advantages.tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def test_a_sample_of_less_weight_keeps_its_place_in_the_baseline() -> None:
    batch = formed(weights=(0.0, 0.5)).training
    assert batch.mask[:4].tolist() == [False, False, True, True]
    assert batch.advantages[:4].tolist() == pytest.approx([0, 0, 0.5, 0.5], abs=1e-5)


def test_the_tasks_masks_and_weights_lie_over_the_rows() -> None:
    task = FakeTask({1: Signals(mask=np.array([True, False]), weights=np.array([2.0, 3.0], np.float32))})
    single = group(trajectory(0, 0), trajectory(0, 1), values=(0.0, 1.0))
    batch = form_batch((single,), 0, EXACT, RULES, task).training
    assert batch.mask.tolist() == [True, True, True, False]
    assert batch.advantages.tolist() == pytest.approx([-1, -1, 2, 3], abs=1e-5)


@pytest.mark.parametrize(
    "signals",
    [
        Signals(mask=np.array([True])),
        Signals(mask=np.array([1.0, 0.0])),
        Signals(weights=np.ones((2, 1), np.float32)),
        Signals(weights=np.array([1.0, np.nan], np.float32)),
        Signals(weights=np.array(["a", "b"])),
    ],
    ids=["too short", "a mask of numbers", "a column", "not finite", "texts"],
)
def test_signals_that_fit_no_trajectory_are_answered_with_a_sentence(signals: Signals) -> None:
    single = group(trajectory(0, 0), trajectory(0, 1), values=(0.0, 1.0))
    with pytest.raises(UserError, match=r"signals for demo/0/a/1 have (mask|weights) of type .* expected are 2 finite values"):
        form_batch((single,), 0, EXACT, RULES, FakeTask({1: signals}))


def test_the_report_names_every_sample_and_how_it_was_cut() -> None:
    batch = formed(rules=BatchRules(num_updates=2, micro_batch_tokens=7))
    columns = batch.columns
    columns.check()
    assert columns.num_samples == 4
    assert np.frombuffer(columns.partitions, TOKEN_DTYPE).tolist() == [0, 0, 1, 1]
    assert np.frombuffer(columns.offsets, OFFSET_DTYPE).tolist() == [0, 1, 100, 101]
    assert np.frombuffer(columns.seqs, OFFSET_DTYPE).tolist() == [0, 0, 1, 1]
    assert columns.attempts == ("a", "a")
    assert np.frombuffer(columns.group_sizes, TOKEN_DTYPE).tolist() == [2, 2]
    assert np.frombuffer(columns.rewards[0].values, VALUE_DTYPE).tolist() == [0.0, 1.0, 5.0, 5.0]
    assert np.frombuffer(columns.updates, TOKEN_DTYPE).tolist() == [1, 2], "two short samples go together, two long ones alone"
    assert batch.training.update_sizes.tolist() == [1, 2]
    assert sorted(np.frombuffer(columns.order, TOKEN_DTYPE).tolist()) == [0, 1, 2, 3]


def test_rewards_add_up_by_weight_and_a_missing_optional_one_counts_as_its_default() -> None:
    terms = (RewardTerm(name="exact", weight=2.0), RewardTerm(name="style", weight=1.0, required=False, default=0.5))
    batch = form_batch((group(trajectory(0, 0), trajectory(0, 1), values=(0.0, 1.0)),), 0, terms, RULES, FakeTask())
    assert batch.rewards.tolist() == [0.5, 2.5]
    stats = {stats.name: (stats.mean, stats.minimum, stats.maximum) for stats in batch.reward_stats}
    assert stats == {"exact": (0.5, 0.0, 1.0), "style": (0.5, 0.5, 0.5), "total": (1.5, 0.5, 2.5)}
    style = batch.columns.rewards[1]
    assert style.name == "style"
    assert list(style.defaulted) == [1, 1]


def test_experts_lie_beside_their_tokens_and_nobody_knows_those_of_the_last() -> None:
    """In 300 experts a number takes two bytes, in 4 one: both are the same to the trainer."""
    wide = np.array([[[299, 1]], [[2, 3]]], np.uint16)
    narrow = np.array([[[0, 1]], [[2, 3]]], np.uint8)
    samples = [trajectory(0, 0, experts=Experts.of(wide)), trajectory(0, 1), trajectory(0, 2, experts=Experts.of(narrow))]
    unknown = [-1, -1]
    assert expert_rows(samples).tolist() == [[299, 1], [2, 3], unknown, *[unknown] * 3, [0, 1], [2, 3], unknown]
    assert expert_rows(samples[1:2]).size == 0, "nothing is said, and nothing travels to the ranks"


@pytest.mark.parametrize("numbers", [np.zeros((1, 1, 2), np.uint8), np.zeros((3, 1, 2), np.uint8), np.zeros((2, 0, 2), np.uint8)])
def test_experts_of_another_number_of_tokens_are_no_record(numbers: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(InvalidRecord, match="bytes are not 2 experts in"):
        trajectory(0, 0, experts=Experts.of(numbers)).validate()


def test_experts_go_to_the_model_beside_their_tokens_padding_has_none() -> None:
    pytest.importorskip("torch", reason="micro-batches are made for torch: install the extra 'learner'")
    import torch

    from echo_learner.training.tensors import SampleTensors

    said = Experts.of(np.array([[[0, 1]], [[2, 3]]], np.uint8))
    samples = group(trajectory(0, 0, experts=said), trajectory(0, 1), values=(0.0, 1.0))
    batch = form_batch((samples, group(two_turns(1, 0), values=(5.0,))), 4, EXACT, RULES, FakeTask()).training
    ids, _, _, is_cut, experts = SampleTensors(batch, torch.device("cpu")).inputs((0, 2))
    assert is_cut is None
    assert ids is not None
    assert experts is not None
    assert experts.shape == (*ids.shape, 2)
    assert experts[0, :2].tolist() == [[0, 1], [2, 3]]
    assert set(experts[0, 2:].flatten().tolist()) | set(experts[1].flatten().tolist()) == {-1}
    plain = form_batch((group(two_turns(1, 0), values=(5.0,)),), 4, EXACT, RULES, FakeTask()).training
    assert len(SampleTensors(plain, torch.device("cpu")).inputs((0,))) == 3
