"""Measures every micro-batch in the same way for all losses: sums that add up over micro-batches, updates and ranks.

Ratios are *not* clamped here: a loss that truncates its weights and reports the truncated ones looks healthier the further the policies
drift apart. Everything is float64, and sums of ratios are kept as logarithms, so that no ratio overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_learner.losses.interface import LossInputs, LossOutputs

_LARGEST_EXPONENT = 700.0  # exp() of more overflows float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSums:
    """0-d float64 tensors by name. Merging adds `sums`, takes the larger of `maxima`, and adds under the logarithm in `log_sums`."""

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    log_sums: Mapping[str, Tensor]

    def merged(self, other: TokenSums) -> TokenSums:
        """The sums of both. Raises KeyError if the two have different names."""
        return TokenSums(
            sums={name: total + other.sums[name] for name, total in self.sums.items()},
            maxima={name: torch.maximum(total, other.maxima[name]) for name, total in self.maxima.items()},
            log_sums={name: torch.logaddexp(total, other.log_sums[name]) for name, total in self.log_sums.items()},
        )

    def to_vector(self) -> Tensor:
        """All numbers as one float64 tensor [K], in the order of the names: one collective carries them to the other ranks."""
        return torch.stack([*self.sums.values(), *self.maxima.values(), *self.log_sums.values()])

    def with_vector(self, vector: Tensor) -> TokenSums:
        """The TokenSums that another rank with the same names turned into `vector`."""
        names = (*self.sums, *self.maxima, *self.log_sums)
        values = dict(zip(names, vector.unbind(), strict=True))
        return TokenSums(
            sums={name: values[name] for name in self.sums},
            maxima={name: values[name] for name in self.maxima},
            log_sums={name: values[name] for name in self.log_sums},
        )

    def to_floats(self) -> dict[str, float]:
        """Plain numbers by name, for `step_metrics.token_metrics`. The only place that waits for the device."""
        names = (*self.sums, *self.maxima, *self.log_sums)
        return dict(zip(names, self.to_vector().tolist(), strict=True))


def measure_tokens(batch: LossInputs, outputs: LossOutputs, *, entropies: Tensor | None = None, fresh: Tensor | None = None) -> TokenSums:
    """Measure one micro-batch after its loss.

    `entropies` [T]: entropy of the learner's whole distribution at each token, in nats. `fresh` [T] bool: tokens sampled by exactly the
    version that starts this step; a difference between learner and sampler there comes from the engines and not from staleness.
    """
    zero = torch.zeros((), dtype=torch.float64, device=batch.learner.device)
    learner, sampler, start = batch.learner.detach().double(), batch.sampler.double(), batch.start_of_step.double()
    mismatch, update = start - sampler, learner - start
    log_ratio = torch.where(batch.mask, learner - sampler, zero - torch.inf)
    sums = {
        **outputs.sums,
        "num_tokens": batch.mask.sum(),
        "num_response_tokens": batch.sequence_lengths.sum(),
        "num_sequences": torch.full_like(zero, batch.sequence_lengths.shape[0]),
        "num_not_finite": batch.num_not_finite,
        "num_zero_advantage": (batch.mask & (batch.advantages == 0)).sum(),
        "mismatch_k3": _k3(mismatch).sum(),
        "update_k3": _k3(update).sum(),
        "logprob_diff": mismatch.abs().sum(),
        "sampler_nll": -sampler.sum(),
    }
    maxima = {
        "logprob_diff_max": _masked_max(mismatch.abs(), batch.mask),
        "log_ratio_max": _masked_max(learner - sampler, batch.mask),
        "log_ratio_negated_max": _masked_max(sampler - learner, batch.mask),
    }
    if entropies is not None:
        sums["entropy"] = torch.where(batch.mask, entropies.double(), zero).sum()
    if fresh is not None:
        compared = batch.mask & fresh.bool()
        sums["num_fresh"] = compared.sum()
        sums["fresh_logprob_diff"] = torch.where(compared, mismatch.abs(), zero).sum()
        maxima["fresh_logprob_diff_max"] = _masked_max(mismatch.abs(), compared)
    return TokenSums(
        sums={name: total.detach().to(zero) for name, total in sums.items()},
        maxima=maxima,
        log_sums={"log_ratio_sum": _logsumexp(log_ratio), "log_ratio_square_sum": _logsumexp(2 * log_ratio)},
    )


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, [...] for logits [..., V] of any precision; vocabulary entries of -inf count as impossible."""
    return entropy_of_logprobs(torch.log_softmax(logits.float(), dim=-1))


def entropy_of_logprobs(logprobs: Tensor) -> Tensor:
    """The same for logarithms of probabilities [..., V] that add up to 1, float32."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)


def _k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r with samples from the denominator: an unbiased, never negative estimate of KL(denominator || numerator)."""
    return torch.expm1(log_ratio.clamp(max=_LARGEST_EXPONENT)) - log_ratio


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """The largest unmasked value, 0-d; -inf when there is none."""
    floor = values.new_full((1,), -torch.inf)
    return torch.cat([torch.where(mask, values, floor), floor]).max()


def _logsumexp(values: Tensor) -> Tensor:
    """log(sum(exp(values))), 0-d; -inf for no values at all."""
    return torch.logsumexp(torch.cat([values, values.new_full((1,), -torch.inf)]), dim=0)
