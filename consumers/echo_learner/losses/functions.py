"""The losses, a function each: from a batch and its config to LossOutputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from echo_learner.losses.config import Cispo, Clip, DecoupledPpo, Divergence, Dppo, GrpoClip, GrpoTis, Gspo, IcePop, SequenceMask
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import (
    LOG_RATIO_LIMIT,
    Surrogate,
    bounded_ratio,
    clipped_surrogate,
    reduce_loss,
    rejection_flags,
    sequence_means,
    start_to_sampler,
)

_SMALLEST_REST = 1e-8  # probability of all other tokens: below this, float32 cannot tell 1 - p from 0


def grpo_clip(batch: LossInputs, config: GrpoClip) -> LossOutputs:
    """Plain GRPO, one clipped ratio against the sampler: -min(r·A, clip(r, 1 - e_low, 1 + e_high)·A), r = pi/mu.

    GRPO (arXiv 2402.03300, eq. 3) with the sampler as the old policy.
    """
    ratio = bounded_ratio(batch.learner, batch.sampler)
    surrogate = clipped_surrogate(ratio, batch.advantages, config)
    return reduce_loss(batch, -surrogate.values, ratio, surrogate.flags)


def grpo_tis(batch: LossInputs, config: GrpoTis) -> LossOutputs:
    """GRPO with truncated importance sampling: -min(pi_prev/mu, C) · min(r·A, clip(r, 1 - e_low, 1 + e_high)·A), r = pi/pi_prev.

    ECHO-2, the default: r is eq. 23, the truncated weight eq. 24 (C is `cap`), the clipped mean eq. 25.
    """
    return _truncated(batch, _surrogate(batch, config), config.cap)


def cispo(batch: LossInputs, config: Cispo) -> LossOutputs:
    """CISPO, also known as token-level truncated importance sampling: -sg(clip(pi/mu, floor, cap)) · A · log pi.

    MiniMax-M1 (arXiv 2506.13585). A clipped weight keeps its gradient: no token is ever silenced, unlike under a
    clipped surrogate.
    """
    ratio = bounded_ratio(batch.learner.detach(), batch.sampler)
    weights = ratio.clamp(config.floor, config.cap)
    flags = {"truncated": ratio > config.cap, "raised": ratio < config.floor}
    return reduce_loss(batch, -weights * batch.advantages * batch.learner, weights, flags)


def icepop(batch: LossInputs, config: IcePop) -> LossOutputs:
    """Rejects tokens whose ratio of learner and sampler is too small or too large.

    -M(k) · min(r·A, clip(r)·A), k = pi_prev/mu, M(k) = k inside [low, high], else 0, r = pi/pi_prev. IcePop (Ring-1T, arXiv 2510.18855).
    """
    correction = start_to_sampler(batch)
    return _rejecting(batch, config, correction, (correction < config.low) | (correction > config.high))


def decoupled_ppo(batch: LossInputs, config: DecoupledPpo) -> LossOutputs:
    """Corrects for the sampler, and stays close to the learner at the start of the step.

    -w · min(r·A, clip(r)·A), w = pi_prev/mu or 0 where that is above `reject_above`, r = pi/pi_prev. AReaL (arXiv 2505.24298). The proximal
    policy is the learner at the start of the step. Unlike `grpo_tis`, a weight that is too large is dropped, not cut.
    """
    correction = start_to_sampler(batch)
    return _rejecting(batch, config, correction, correction > config.reject_above)


def sequence_mask(batch: LossInputs, config: SequenceMask) -> LossOutputs:
    """Rejects a sequence whose mean token probability has changed too much between sampler and learner.

    -K · min(pi_prev/mu, cap) · min(r·A, clip(r)·A), r = pi/pi_prev, K = 1 while exp(mean_t log(pi_prev/mu)) of the sequence is inside
    [low, high], else 0. The geometric sequence mask of SkyRL and verl (`rollout_rs` on the sequence mean), stacked on token weights as
    OpenRLHF's `seq-mask-tis`.
    """
    correction = start_to_sampler(batch)
    geometric = torch.exp(sequence_means(batch.start_of_step - batch.sampler, batch))
    outside = (geometric < config.low) | (geometric > config.high)
    rejected = outside[batch.sequence_ids]
    truncated = {"truncated": (correction > config.cap) & ~rejected}
    outputs = _rejecting(batch, config, correction.clamp(max=config.cap), rejected, truncated)
    return replace(outputs, sums={**outputs.sums, "num_sequences_rejected": outside.sum()})


def gspo(batch: LossInputs, config: Gspo) -> LossOutputs:
    """One clipped ratio for the whole sequence: -min(pi_prev/mu, cap) · min(s·A, clip(s)·A), s = exp(mean_t log(pi/pi_prev)) .

    GSPO (arXiv 2507.18071, eq. 5 to 7): one s for all tokens of a sequence. The paper averages over sequences:
    normalisation `sequence` gives its objective. Its old policy is pi_prev here, since its clip is far too tight for a
    stale sampler; a weight for each token corrects for the sampler. Since all tokens share s, each token's gradient has the mean of its
    sequence's weights; verl, with a gradient through the token's own ratio (GSPO-token, eq. 13), gives each token its own weight.
    """
    log_ratios = sequence_means(batch.learner - batch.start_of_step, batch)
    ratio = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[batch.sequence_ids]
    return _truncated(batch, clipped_surrogate(ratio, batch.advantages, config.clip), config.cap)


def dppo(batch: LossInputs, config: Dppo) -> LossOutputs:
    """Rejects a token by the change of its probability, not by its ratio.

    -keep · sg(min(pi/mu, cap)) · A · log pi + penalty · (log pi/mu)^2. DPPO (arXiv 2602.04879); the penalty is prime-rl's. keep is 0 where
    the token has already moved beyond the threshold in the direction of its advantage: up for A > 0, else down.
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


def _surrogate(batch: LossInputs, clip: Clip) -> Surrogate:
    """The clipped surrogate of r = pi/pi_prev."""
    return clipped_surrogate(bounded_ratio(batch.learner, batch.start_of_step), batch.advantages, clip)


def _truncated(batch: LossInputs, surrogate: Surrogate, cap: float) -> LossOutputs:
    """-min(pi_prev/mu, cap) · surrogate."""
    correction = start_to_sampler(batch)
    weights = correction.clamp(max=cap)
    return reduce_loss(batch, -weights * surrogate.values, weights, {**surrogate.flags, "truncated": correction > cap})


def _rejecting(
    batch: LossInputs, clip: Clip, weights: Tensor, rejected: Tensor, further_flags: dict[str, Tensor] | None = None
) -> LossOutputs:
    """-weights · min(r·A, clip(r)·A), r = pi/pi_prev, with weight 0 for the tokens `rejected`."""
    weights = torch.where(rejected, torch.zeros_like(weights), weights)
    surrogate = _surrogate(batch, clip)
    flags = {**surrogate.flags, **(further_flags or {}), **rejection_flags(rejected, batch.advantages)}
    return reduce_loss(batch, -weights * surrogate.values, weights, flags)


def _divergence(learner: Tensor, sampler: Tensor, divergence: Divergence) -> Tensor:
    """Binary divergence at the sampled token, [T]: |pi - mu|, or KL(mu || pi) with all other tokens taken as one."""
    if divergence is Divergence.TOTAL_VARIATION:
        return (learner.exp() - sampler.exp()).abs()
    learner_rest = (-torch.expm1(learner)).clamp(min=_SMALLEST_REST)
    sampler_rest = (-torch.expm1(sampler)).clamp(min=_SMALLEST_REST)
    return sampler.exp() * (sampler - learner) + sampler_rest * (sampler_rest / learner_rest).log()
