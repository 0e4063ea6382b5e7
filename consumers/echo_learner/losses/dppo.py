"""DPPO: rejects a token by the change of its probability, not by its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from echo_learner.losses.config import Divergence, Dppo
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import LOG_RATIO_LIMIT, bounded_ratio, reduce_loss, rejection_flags

_SMALLEST_REST = 1e-8  # probability of all other tokens: below this, float32 cannot tell 1 - p from 0


def dppo(batch: LossInputs, config: Dppo) -> LossOutputs:
    """-keep · sg(min(pi/mu, cap)) · A · log pi + penalty · (log pi/mu)^2.

    DPPO (arXiv 2602.04879); the penalty is prime-rl's. keep is 0 where the token has already moved beyond the threshold
    in the direction of its advantage: up for A > 0, else down.
    """
    learner = batch.learner.detach()
    moved = learner.exp() - batch.sampler.exp()
    far = _divergence(learner, batch.sampler, config.divergence) > config.limit
    rejected = far & torch.where(batch.advantages > 0, moved > 0, moved < 0)
    ratio = bounded_ratio(learner, batch.sampler)
    weights = torch.where(rejected, torch.zeros_like(ratio), ratio.clamp(max=config.cap))
    log_ratio = (batch.learner - batch.sampler).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    per_token = -weights * batch.advantages * batch.learner + config.log_ratio_penalty * log_ratio.square()
    flags = {"truncated": (ratio > config.cap) & ~rejected, **rejection_flags(rejected, batch.advantages)}
    return reduce_loss(batch, per_token, weights, flags)


def _divergence(learner: Tensor, sampler: Tensor, divergence: Divergence) -> Tensor:
    """Binary divergence at the sampled token, [T]: |pi - mu|, or KL(mu || pi) with all other tokens taken as one."""
    if divergence is Divergence.TOTAL_VARIATION:
        return (learner.exp() - sampler.exp()).abs()
    learner_rest = (-torch.expm1(learner)).clamp(min=_SMALLEST_REST)
    sampler_rest = (-torch.expm1(sampler)).clamp(min=_SMALLEST_REST)
    return sampler.exp() * (sampler - learner) + sampler_rest * (sampler_rest / learner_rest).log()
