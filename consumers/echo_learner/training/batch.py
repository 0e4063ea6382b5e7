"""From chosen groups to the arrays a trainer takes and the columns a StepReport keeps. Pure: numpy in, numpy out.

N samples, L tokens in all (prompts and answers), G generated tokens in all; samples lie group after group, tokens sample after sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from echo_core.advantages import AdvantageScale, group_advantages, has_signal, total_reward
from echo_core.batch_choice import ChosenGroup, ChosenSample
from echo_core.normalisation import UpdateSplit
from echo_learner.training.microbatches import MicroBatchPlan, plan_micro_batches
from echo_schemas.columns import FLAG_DTYPE, LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE, VALUE_DTYPE, pack
from echo_schemas.errors import UserError
from echo_schemas.records import Batch, LogprobSource, RewardColumn, RewardStats, RewardTerm, Trajectory

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TOTAL_REWARD = "total"
"""Name of the weighted sum in reward statistics."""


class SignalSource(Protocol):
    """The third duty of a task (ECHO-2 §3): which generated tokens are trained, and how much each counts."""

    def signals(self, trajectory: Trajectory, /) -> Any:
        """`mask` [G] bool or None, `weights` [G] float32 or None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """One step's samples as flat arrays.

    `tokens` int32 [L]; `lengths` int64 [N]; `generated` bool [L]: which tokens the policy generated. Per generated token: `sampler` float32
    [G] log-probability when sampled, `advantages` float32 [G], `mask` bool [G] trained on or not, `fresh` bool [G] sampled by `version`,
    `recomputed` bool [G] the sampler gave none, so the trainer takes its own at the step's start (importance weight 1); empty: none,
    `cut` bool [G] `sampler` is of the distribution after top_p, top_k and min_p, so the learner's must be, too; empty: none.
    `experts` int16 [L, layers · experts a token]: where tokens went when sampled, -1 where unknown; empty: all unknown.
    `num_generated` int64 [N]. `order`, `micro_batch_sizes`, `update_sizes` int32: the plan, see `microbatches`.
    """

    version: int
    tokens: npt.NDArray[np.int32]
    lengths: Ints
    generated: Flags
    num_generated: Ints
    sampler: Floats
    advantages: Floats
    mask: Flags
    fresh: Flags
    order: npt.NDArray[np.int32]
    micro_batch_sizes: npt.NDArray[np.int32]
    update_sizes: npt.NDArray[np.int32]
    recomputed: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    cut: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    experts: npt.NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 0), np.int16))

    @property
    def recomputed_fraction(self) -> float:
        """Share of generated tokens whose log-probability the trainer computes."""
        return float(self.recomputed.mean()) if self.recomputed.size else 0.0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Every array by name, to be sent to another rank."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "version"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How a batch is formed, beside the staleness policy."""

    num_updates: int
    micro_batch_tokens: int
    scale: AdvantageScale = AdvantageScale.POPULATION
    split: UpdateSplit = UpdateSplit.GROUPS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FormedBatch:
    """A batch, ready to train and to report. `rewards` float64 [N]: the weighted sums; `trajectories` in the batch's order."""

    training: TrainingBatch
    columns: Batch
    trajectories: tuple[Trajectory, ...]
    rewards: npt.NDArray[np.float64]
    reward_stats: tuple[RewardStats, ...]
    groups_without_signal: int


def form_batch(
    groups: Sequence[ChosenGroup], version: int, terms: tuple[RewardTerm, ...], rules: BatchRules, task: SignalSource
) -> FormedBatch:
    """The batch of `groups`, formed at learner version `version` under the reward specification `terms`.

    Raises ValueError for groups without samples, and KeyError if a sample lacks a required reward: `choose_batch` lets neither through.
    UserError if the task's signals do not fit.
    """
    samples = [sample for group in groups for sample in group.samples]
    trajectories = tuple(sample.member.trajectory for sample in samples)
    sizes = [len(group.samples) for group in groups]
    rewards = np.array([_reward(sample, terms) for sample in samples], np.float64)
    per_sample, without_signal = _advantages(rewards, sizes, scale=rules.scale)
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    plan = plan_micro_batches(lengths, sizes, num_updates=rules.num_updates, max_tokens=rules.micro_batch_tokens, split=rules.split)
    training = _training_batch(samples, per_sample, plan, version, task)
    stats = tuple(_stats(term.name, _values(samples, term)) for term in terms)
    return FormedBatch(
        training=training,
        columns=_columns(groups, samples, terms, per_sample, plan),
        trajectories=trajectories,
        rewards=rewards,
        reward_stats=(*stats, _stats(TOTAL_REWARD, rewards)),
        groups_without_signal=without_signal,
    )


def _reward(sample: ChosenSample, terms: tuple[RewardTerm, ...]) -> float:
    return total_reward({name: score.value for name, score in sample.member.scores.items()}, terms)


def _advantages(rewards: npt.NDArray[np.float64], sizes: Sequence[int], *, scale: AdvantageScale) -> tuple[Floats, int]:
    """Group-normalised advantages [N], and the number of groups whose rewards were all the same."""
    parts, without_signal, start = [], 0, 0
    for size in sizes:
        group = rewards[start : start + size]
        parts.append(group_advantages(group, scale=scale))
        without_signal += not has_signal(group)
        start += size
    return np.concatenate(parts).astype(np.float32), without_signal


def _training_batch(
    samples: Sequence[ChosenSample], per_sample: Floats, plan: MicroBatchPlan, version: int, task: SignalSource
) -> TrainingBatch:
    trajectories = [sample.member.trajectory for sample in samples]
    num_generated = np.array([trajectory.num_generated for trajectory in trajectories], np.int64)
    weights = np.array([sample.weight for sample in samples], np.float32)
    advantages = np.repeat(per_sample * weights, num_generated)
    mask = np.repeat(weights > 0, num_generated)
    unsaid = np.array([trajectory.logprob_source is LogprobSource.RECOMPUTED for trajectory in trajectories])
    fresh = np.repeat(np.array([t.min_version == version == t.max_version for t in trajectories]) & ~unsaid, num_generated)
    _apply_signals(trajectories, num_generated, advantages, mask, task)
    return TrainingBatch(
        version=version,
        advantages=advantages,
        mask=mask,
        fresh=fresh,
        recomputed=np.repeat(unsaid, num_generated if unsaid.any() else 0),
        **sample_arrays(trajectories, plan),
    )


def sample_arrays(trajectories: Sequence[Trajectory], plan: MicroBatchPlan) -> dict[str, npt.NDArray[Any]]:
    """The fields of a TrainingBatch that the samples and the plan give, by name."""
    lengths = np.array([len(trajectory.tokens) for trajectory in trajectories], np.int64)
    num_generated = np.array([trajectory.num_generated for trajectory in trajectories], np.int64)
    generated = np.zeros(int(lengths.sum()), np.bool_)
    for start, trajectory in zip((np.cumsum(lengths) - lengths).tolist(), trajectories, strict=True):
        for span in trajectory.generated:
            generated[start + span.start : start + span.end] = True
    return {
        "tokens": np.frombuffer(b"".join(trajectory.token_ids for trajectory in trajectories), TOKEN_DTYPE),
        "lengths": lengths,
        "generated": generated,
        "num_generated": num_generated,
        "sampler": np.frombuffer(b"".join(trajectory.logprobs for trajectory in trajectories), LOGPROB_DTYPE),
        "order": plan.order,
        "micro_batch_sizes": plan.micro_batch_sizes,
        "update_sizes": plan.update_sizes,
        "cut": cut_tokens(trajectories),
        "experts": expert_rows(trajectories),
    }


def cut_tokens(trajectories: Sequence[Trajectory]) -> Flags:
    """`TrainingBatch.cut`: a flag for each generated token, or empty if no trajectory is cut."""
    is_cut = np.array([trajectory.is_cut for trajectory in trajectories])
    return np.repeat(is_cut, [trajectory.num_generated if is_cut.any() else 0 for trajectory in trajectories])


def expert_rows(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.int16]:
    """`TrainingBatch.experts`. Samples of one model have the same layers and experts a token; the intake refuses others."""
    said = [trajectory.experts for trajectory in trajectories if trajectory.experts is not None]
    if not said:
        return np.zeros((0, 0), np.int16)
    width = said[0].layers * said[0].per_token
    rows = [np.full((len(trajectory.tokens), width), -1, np.int16) for trajectory in trajectories]
    for row, trajectory in zip(rows, trajectories, strict=True):
        if trajectory.experts is not None:
            row[:-1] = trajectory.experts.table(len(row))
    return np.concatenate(rows)


def _apply_signals(trajectories: Sequence[Trajectory], num_generated: Ints, advantages: Floats, mask: Flags, task: SignalSource) -> None:
    """Apply the task's masks and weights to the rows, in place. Raises UserError for arrays of another length or type."""
    start = 0
    for trajectory, length in zip(trajectories, num_generated.tolist(), strict=True):
        signals = task.signals(trajectory)
        if signals.mask is not None:
            mask[start : start + length] &= _signal("mask", signals.mask, np.bool_, trajectory)
        if signals.weights is not None:
            advantages[start : start + length] *= _signal("weights", signals.weights, np.float32, trajectory)
        start += length


def _signal(name: str, given: Any, dtype: type[np.generic], trajectory: Trajectory) -> npt.NDArray[Any]:
    row = np.asarray(given)
    if row.shape != (trajectory.num_generated,) or not np.can_cast(row.dtype, dtype, "same_kind") or not np.isfinite(row).all():
        raise UserError(
            f"The task's signals for {trajectory.name} have {name} of type {row.dtype} and shape {row.shape}; expected are "
            f"{trajectory.num_generated} finite values of {np.dtype(dtype)}.",
            hint="signals() must return one value for each generated token, or None if all are alike.",
        )
    return row


def _columns(
    groups: Sequence[ChosenGroup], samples: Sequence[ChosenSample], terms: tuple[RewardTerm, ...], per_sample: Floats, plan: MicroBatchPlan
) -> Batch:
    members = [sample.member for sample in samples]
    return Batch(
        num_samples=len(samples),
        partitions=pack([member.where.partition for member in members], TOKEN_DTYPE),
        offsets=pack([member.where.offset for member in members], OFFSET_DTYPE),
        seqs=pack([member.trajectory.seq for member in members], OFFSET_DTYPE),
        indices=pack([member.trajectory.index for member in members], TOKEN_DTYPE),
        attempts=tuple(group.samples[0].member.trajectory.attempt for group in groups),
        group_sizes=pack([len(group.samples) for group in groups], TOKEN_DTYPE),
        rewards=tuple(
            RewardColumn(
                name=term.name,
                values=pack(_values(samples, term), VALUE_DTYPE),
                defaulted=pack([_is_defaulted(sample, term) for sample in samples], FLAG_DTYPE),
            )
            for term in terms
        ),
        advantages=pack(per_sample, LOGPROB_DTYPE),
        order=pack(plan.order, TOKEN_DTYPE),
        micro_batches=pack(plan.micro_batch_sizes, TOKEN_DTYPE),
        updates=pack(plan.update_sizes, TOKEN_DTYPE),
    )


def _values(samples: Sequence[ChosenSample], term: RewardTerm) -> npt.NDArray[np.float64]:
    """One reward's value of each sample, [N]; an optional one that is missing counts as its default."""
    missing = term.default or 0.0
    scores = (sample.member.scores.get(term.name) for sample in samples)
    return np.array([missing if score is None else score.value for score in scores], np.float64)


def _is_defaulted(sample: ChosenSample, term: RewardTerm) -> bool:
    score = sample.member.scores.get(term.name)
    return score is None or score.defaulted


def _stats(name: str, values: npt.NDArray[np.float64]) -> RewardStats:
    return RewardStats(
        name=name,
        mean=float(values.mean()),
        std=float(values.std()),
        minimum=float(values.min()),
        maximum=float(values.max()),
        stderr=float(values.std() / np.sqrt(len(values))),
    )
