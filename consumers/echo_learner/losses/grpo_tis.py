"""GRPO with truncated importance sampling, as in ECHO-2: the default loss."""

from __future__ import annotations

from echo_learner.losses.config import GrpoTis
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import bounded_ratio, clipped_surrogate, reduce_loss, start_to_sampler


def grpo_tis(batch: LossInputs, config: GrpoTis) -> LossOutputs:
    """-min(pi_prev/mu, C) · min(r·A, clip(r, 1 - e_low, 1 + e_high)·A), r = pi/pi_prev.

    ECHO-2: r is eq. 23, the truncated weight eq. 24 (C is `cap`), the clipped mean eq. 25.
    """
    correction = start_to_sampler(batch)
    weights = correction.clamp(max=config.cap)
    surrogate = clipped_surrogate(bounded_ratio(batch.learner, batch.start_of_step), batch.advantages, config)
    flags = {**surrogate.flags, "truncated": correction > config.cap}
    return reduce_loss(batch, -weights * surrogate.values, weights, flags)
