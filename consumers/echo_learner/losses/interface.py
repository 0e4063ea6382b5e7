"""The inputs and outputs of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch as flat token tensors. T response tokens of N whole sequences, in any order.

    `learner` [T], with gradient: log-probabilities under the policy being trained. `sampler` [T]: under the policy that sampled.
    `previous` [T] or None: under the learner at the start of the step; None in the first update of a step, when the learner has not changed
    yet. `reference` [T] or None: under the reference policy. `advantages` [T]. `mask` [T] bool: tokens to train on.
    `sequence_ids` [T] int64 in [0, N). `sequence_lengths` [N] int64: response tokens of each sequence, masked ones included.
    `sequence_scales` [N]: the factor of each sequence's tokens in the sum, made by `echo_core.normalisation.sequence_scales` from the
    lengths of the *whole update*, all micro-batches and ranks: that is why the gradients of micro-batches add up to the update's.

    After construction masked tokens hold log-probability 0 and advantage 0, so padding and NaN reach neither the loss nor the gradient.
    The same is done to an unmasked token with a number that is not finite, and `num_not_finite` (0-d) counts it: a trainer must not apply
    an update with such a token. Half-precision tensors become float32.
    """

    learner: Tensor
    sampler: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    sequence_lengths: Tensor
    sequence_scales: Tensor
    previous: Tensor | None = None
    reference: Tensor | None = None
    num_not_finite: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.learner.shape
        if len(shape) != 1:
            raise ValueError(f"Log-probabilities are flat, [T]; these have shape {tuple(shape)}.")
        rows = {
            "learner": self.learner,
            "sampler": self.sampler,
            "advantages": self.advantages,
            "previous": self.previous,
            "reference": self.reference,
        }
        for name, row in {**rows, "mask": self.mask, "sequence_ids": self.sequence_ids}.items():
            if row is not None and row.shape != shape:
                raise ValueError(f"{name} has shape {tuple(row.shape)}, the learner's log-probabilities {tuple(shape)}.")
        if self.sequence_scales.shape != self.sequence_lengths.shape:
            raise ValueError(f"{len(self.sequence_lengths)} sequences have {len(self.sequence_scales)} scales.")
        dtype = torch.promote_types(self.learner.dtype, torch.float32)
        present = {name: row.to(dtype) for name, row in rows.items() if row is not None}
        finite = torch.stack([row.detach().isfinite() for row in present.values()]).all(dim=0)
        wanted = self.mask.bool()
        usable = wanted & finite
        zero = torch.zeros((), dtype=dtype, device=self.learner.device)
        for name, row in present.items():
            cleaned = torch.where(usable, row, zero)
            object.__setattr__(self, name, cleaned if name == "learner" else cleaned.detach())
        object.__setattr__(self, "mask", usable)
        object.__setattr__(self, "num_not_finite", (wanted & ~finite).sum())

    @property
    def start_of_step(self) -> Tensor:
        """Log-probabilities under pi_prev, [T], without gradient."""
        return self.learner.detach() if self.previous is None else self.previous

    @property
    def token_scales(self) -> Tensor:
        """The factor of each token's term in the sum, [T]."""
        return self.sequence_scales.to(self.learner.dtype)[self.sequence_ids]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    """A micro-batch's share of the loss of its update.

    `loss`: 0-d, with gradient, ready for backward() without further division.
    `weights` [T], without gradient: the estimate of (policy / sampler) that the loss gave each token; 0 where it
    rejected the token. `sums`: 0-d tensors without gradient, each a *sum* over this micro-batch, so that micro-batches
    and ranks add up.
    """

    loss: Tensor
    weights: Tensor
    sums: Mapping[str, Tensor]


class Loss(Protocol):
    """A policy loss: pure, deterministic, no state."""

    def __call__(self, batch: LossInputs, /) -> LossOutputs: ...
