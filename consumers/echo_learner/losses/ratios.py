"""Functions that the losses share: bounded ratios, the clipped surrogate, means over sequences, the final sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from echo_learner.losses.config import Clip
from echo_learner.losses.interface import LossInputs, LossOutputs

LOG_RATIO_LIMIT = 20.0
"""A log-ratio beyond this is cut before exp(), as in verl: e^20 is far outside any clip and its square fits float32."""


def bounded_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator), [T], finite for any finite log-probabilities; no gradient where the limit cuts."""
    return torch.exp((numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def start_to_sampler(batch: LossInputs) -> Tensor:
    """pi_prev / mu per token, [T], without gradient: staleness and engine mismatch together."""
    return bounded_ratio(batch.start_of_step, batch.sampler)


class Surrogate(NamedTuple):
    """The clipped surrogate, [T], and which tokens it clipped: flags for `reduce_loss`."""

    values: Tensor
    flags: dict[str, Tensor]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Surrogate:
    """min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), for A < 0 bounded below by dual_clip·A.

    PPO (arXiv 1707.06347) and its dual clip (arXiv 1912.09729). A clipped token has no gradient. A token that the dual clip bounds counts
    as clipped high.
    """
    low, high, dual_clip = 1 - clip.clip_low, 1 + clip.clip_high, clip.dual_clip
    inside = ratio.clamp(low, high)
    values = torch.minimum(ratio * advantages, inside * advantages)
    clipped_low = (ratio < low) & (advantages < 0)
    clipped_high = (ratio > high) & (advantages > 0)
    if dual_clip is not None:
        held = (advantages < 0) & (ratio > dual_clip)
        values = torch.where(held, dual_clip * advantages, values)
        clipped_high = clipped_high | held
    return Surrogate(values, {"clipped_low": clipped_low, "clipped_high": clipped_high})


def sequence_means(values: Tensor, batch: LossInputs) -> Tensor:
    """Mean of `values` [T] over the unmasked tokens of each sequence, [N]; 0 for a sequence without any."""
    num_sequences = batch.sequence_lengths.shape[0]
    kept = torch.where(batch.mask, values, torch.zeros_like(values))
    totals = kept.new_zeros(num_sequences).index_add(0, batch.sequence_ids, kept)
    counts = kept.new_zeros(num_sequences).index_add(0, batch.sequence_ids, batch.mask.to(kept.dtype))
    return totals / counts.clamp(min=1)


def reduce_loss(batch: LossInputs, per_token: Tensor, weights: Tensor, flags: Mapping[str, Tensor]) -> LossOutputs:
    """The normalised sum of `per_token` [T] over unmasked tokens; each of `flags`, bool [T], is counted as `num_<name>`."""
    kept = torch.where(batch.mask, per_token, torch.zeros_like(per_token))
    loss = (kept * batch.token_scales).sum()
    weights = torch.where(batch.mask, weights.detach(), torch.zeros_like(weights))
    sums = {"policy_loss": loss.detach(), "weight": weights.sum()}
    sums |= {f"num_{name}": (flag & batch.mask).sum() for name, flag in flags.items()}
    return LossOutputs(loss=loss, weights=weights, sums=sums)


def rejection_flags(rejected: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Flags of rejected tokens by the sign of their advantage: rejecting one sign more often biases the policy."""
    return {
        "rejected": rejected,
        "rejected_positive": rejected & (advantages > 0),
        "rejected_negative": rejected & (advantages < 0),
    }
