"""CISPO, also known as token-level truncated importance sampling: REINFORCE with a clipped weight."""

from __future__ import annotations

from echo_learner.losses.config import Cispo
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import bounded_ratio, reduce_loss


def cispo(batch: LossInputs, config: Cispo) -> LossOutputs:
    """-sg(clip(pi/mu, floor, cap)) · A · log pi.

    MiniMax-M1 (arXiv 2506.13585). A clipped weight keeps its gradient: no token is ever silenced, unlike under a
    clipped surrogate.
    """
    ratio = bounded_ratio(batch.learner.detach(), batch.sampler)
    weights = ratio.clamp(config.floor, config.cap)
    flags = {"truncated": ratio > config.cap, "raised": ratio < config.floor}
    return reduce_loss(batch, -weights * batch.advantages * batch.learner, weights, flags)
