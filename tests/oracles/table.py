"""Random log-probabilities as the others hold them, rows of right-padded answers, and the same as our losses take them."""

from __future__ import annotations

import torch
from torch import Tensor

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.losses.catalogue import build_loss
from echo_learner.losses.config import LossConfig, ReferenceKl
from echo_learner.losses.interface import LossInputs

ROWS, COLUMNS, MAX_LENGTH = 4, 6, 16
SEEDS = range(3)


class Table:
    """All [rows, columns], float64; `mask` bool. `learner` has a gradient."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)

        self.sampler = -0.1 - normal(1.5).abs()
        # Probabilities stay below 1, as some losses look at what is left.
        self.previous = (self.sampler + normal(0.4)).clamp(max=-0.01)
        self.learner = (self.previous + normal(0.3)).clamp(max=-0.01).requires_grad_()
        self.reference = self.learner.detach() + normal(0.5)
        self.advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
        self.mask = torch.arange(COLUMNS) < torch.tensor([6, 2, 4, 1]).unsqueeze(1)

    def our_loss(self, config: LossConfig, mode: Normalisation, *, kl: ReferenceKl | None = None, has_previous: bool = True) -> Tensor:
        """0-d, of the whole table as one update. `has_previous` False: the step starts from the learner as it is."""
        lengths, keep = self.mask.sum(dim=1), self.mask
        batch = LossInputs(
            learner=self.learner[keep],
            sampler=self.sampler[keep],
            previous=self.previous[keep] if has_previous else None,
            reference=self.reference[keep],
            advantages=self.advantages.unsqueeze(1).expand(ROWS, COLUMNS)[keep],
            mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
            sequence_ids=torch.repeat_interleave(torch.arange(ROWS), lengths),
            sequence_lengths=lengths,
            sequence_scales=torch.from_numpy(sequence_scales(lengths.numpy(), mode, constant=MAX_LENGTH)),
        )
        return build_loss(config, kl)(batch).loss

    def assert_equal(self, ours: Tensor, theirs: Tensor, *, rtol: float = 1e-12) -> None:
        """In value and in gradient."""
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-14)
        torch.testing.assert_close(*self.gradients(ours, theirs), rtol=rtol, atol=1e-14)

    def gradients(self, *losses: Tensor) -> list[Tensor]:
        """Of each loss by the learner's log-probabilities."""
        return [torch.autograd.grad(loss, self.learner)[0] for loss in losses]
