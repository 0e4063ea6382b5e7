"""IcePop: rejects tokens whose ratio of learner and sampler is too small or too large."""

from __future__ import annotations

import torch

from echo_learner.losses.config import IcePop
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import bounded_ratio, clipped_surrogate, reduce_loss, rejection_flags, start_to_sampler


def icepop(batch: LossInputs, config: IcePop) -> LossOutputs:
    """-M(k) · min(r·A, clip(r)·A), k = pi_prev/mu, M(k) = k inside [low, high], else 0, r = pi/pi_prev.

    IcePop (Ring-1T, arXiv 2510.18855).
    """
    correction = start_to_sampler(batch)
    rejected = (correction < config.low) | (correction > config.high)
    weights = torch.where(rejected, torch.zeros_like(correction), correction)
    surrogate = clipped_surrogate(bounded_ratio(batch.learner, batch.start_of_step), batch.advantages, config)
    flags = {**surrogate.flags, **rejection_flags(rejected, batch.advantages)}
    return reduce_loss(batch, -weights * surrogate.values, weights, flags)
