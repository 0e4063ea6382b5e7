"""GSPO: one clipped ratio for the whole sequence."""

from __future__ import annotations

from echo_learner.losses.config import Gspo
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_learner.losses.ratios import LOG_RATIO_LIMIT, clipped_surrogate, reduce_loss, sequence_means, start_to_sampler


def gspo(batch: LossInputs, config: Gspo) -> LossOutputs:
    """-min(pi_prev/mu, cap) · min(s·A, clip(s)·A), s = exp(mean_t log(pi/pi_prev)) .

    GSPO (arXiv 2507.18071, eq. 5 to 7): one s for all tokens of a sequence. The paper averages over sequences:
    normalisation `sequence` gives its objective. Its old policy is pi_prev here, since its clip is far too tight for a
    stale sampler; a weight for each token corrects for the sampler. Since all tokens share s, each token's gradient has the mean of its
    sequence's weights; verl, with a gradient through the token's own ratio (GSPO-token, eq. 13), gives each token its own weight.
    """
    correction = start_to_sampler(batch)
    weights = correction.clamp(max=config.cap)
    log_ratios = sequence_means(batch.learner - batch.start_of_step, batch)
    ratio = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[batch.sequence_ids]
    surrogate = clipped_surrogate(ratio, batch.advantages, config.clip)
    flags = {**surrogate.flags, "truncated": correction > config.cap}
    return reduce_loss(batch, -weights * surrogate.values, weights, flags)
