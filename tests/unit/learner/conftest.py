"""Random batches for the tests of losses. torch is imported only when a test asks for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs

MakeBatch = Callable[..., "LossInputs"]


@pytest.fixture
def make_batch() -> MakeBatch:
    """`make_batch(seed, **fields)`: float64, 20 tokens of 4 sequences of 5 with nothing masked; `fields` replace what LossInputs takes."""
    import torch

    from echo_learner.losses.interface import LossInputs

    def make(seed: int = 0, **fields: Any) -> LossInputs:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(20, generator=generator, dtype=torch.float64)

        sampler = -0.05 - normal(1.5).abs()
        previous = sampler + normal(0.3)
        values: dict[str, Any] = {
            "learner": (previous + normal(0.1)).requires_grad_(),
            "sampler": sampler,
            "previous": previous,
            "reference": sampler + normal(0.3),
            "advantages": normal(1.0),
            "mask": torch.ones(20, dtype=torch.bool),
            "sequence_ids": torch.arange(20) // 5,
            "sequence_lengths": torch.full((4,), 5),
            "sequence_scales": torch.full((4,), 1 / 20, dtype=torch.float64),
        }
        return LossInputs(**values | fields)

    return make
