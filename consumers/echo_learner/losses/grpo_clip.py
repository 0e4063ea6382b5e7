"""Plain GRPO: one clipped ratio against the sampler."""

from __future__ import annotations

from echo_learner.losses.config import GrpoClip
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import bounded_ratio, clipped_surrogate, reduce_loss


def grpo_clip(batch: LossInputs, config: GrpoClip) -> LossOutputs:
    """-min(r·A, clip(r, 1 - e_low, 1 + e_high)·A), r = pi/mu.

    GRPO (arXiv 2402.03300, eq. 3) with the sampler as the old policy.
    """
    ratio = bounded_ratio(batch.learner, batch.sampler)
    surrogate = clipped_surrogate(ratio, batch.advantages, config)
    return reduce_loss(batch, -surrogate.values, ratio, surrogate.flags)
