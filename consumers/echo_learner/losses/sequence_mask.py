"""Sequence mask: rejects a sequence whose mean token probability has changed too much between sampler and learner."""

from __future__ import annotations

from dataclasses import replace

import torch

from echo_learner.losses.config import SequenceMask
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import bounded_ratio, clipped_surrogate, reduce_loss, rejection_flags, sequence_means, start_to_sampler


def sequence_mask(batch: LossInputs, config: SequenceMask) -> LossOutputs:
    """-K · min(pi_prev/mu, cap) · min(r·A, clip(r)·A), r = pi/pi_prev.

    K = 1 while exp(mean_t log(pi_prev/mu)) of the sequence is inside [low, high], else 0. The geometric sequence mask
    of SkyRL and verl (`rollout_rs` on the sequence mean), stacked on token weights as OpenRLHF's `seq-mask-tis`.
    """
    correction = start_to_sampler(batch)
    geometric = torch.exp(sequence_means(batch.start_of_step - batch.sampler, batch))
    outside = (geometric < config.low) | (geometric > config.high)
    rejected = outside[batch.sequence_ids]
    weights = torch.where(rejected, torch.zeros_like(correction), correction.clamp(max=config.cap))
    surrogate = clipped_surrogate(bounded_ratio(batch.learner, batch.start_of_step), batch.advantages, config)
    flags = {**surrogate.flags, "truncated": (correction > config.cap) & ~rejected, **rejection_flags(rejected, batch.advantages)}
    outputs = reduce_loss(batch, -weights * surrogate.values, weights, flags)
    return replace(outputs, sums={**outputs.sums, "num_sequences_rejected": outside.sum()})
