"""Decoupled PPO: corrects for the sampler, and stays close to the learner at the start of the step."""

from __future__ import annotations

import torch

from echo_learner.losses.config import DecoupledPpo
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import bounded_ratio, clipped_surrogate, reduce_loss, rejection_flags, start_to_sampler


def decoupled_ppo(batch: LossInputs, config: DecoupledPpo) -> LossOutputs:
    """-w · min(r·A, clip(r)·A), w = pi_prev/mu or 0 where that is above `reject_above`, r = pi/pi_prev.

    AReaL (arXiv 2505.24298). The proximal policy is the learner at the start of the step. Unlike `grpo_tis`, a weight
    that is too large is dropped, not cut.
    """
    correction = start_to_sampler(batch)
    rejected = correction > config.reject_above
    weights = torch.where(rejected, torch.zeros_like(correction), correction)
    surrogate = clipped_surrogate(bounded_ratio(batch.learner, batch.start_of_step), batch.advantages, config)
    flags = {**surrogate.flags, **rejection_flags(rejected, batch.advantages)}
    return reduce_loss(batch, -weights * surrogate.values, weights, flags)
