"""Random batches for the tests of losses, and a learner's surroundings in memory. torch is imported only when a test asks for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs
    from tests.unit.learner.pipeline import Pipeline

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


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A namespace in memory, whose learners' threads look up often enough to end at once, and whose disk forgets when the power goes."""
    pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
    from tests.unit.learner.pipeline import Pipeline

    for place in (
        "echo_bus.reading.view._READ_S",
        "echo_learner.intake._READ_S",
        "echo_bus.client.publisher._POLL_S",
        "echo_learner.learner._WAIT_S",
    ):
        monkeypatch.setattr(place, 0.003)
    monkeypatch.setattr("echo_learner.commit.session._LOOK_S", 0.01)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return Pipeline(tmp_path / "run")


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Callable[..., bytes]:
    """`uninterrupted(steps)`: the weights after so many steps of a run in which nothing happened."""

    def weights(steps: int, **sections: Any) -> bytes:
        from tests.unit.learner.numpy_trainer import NumpyTrainer
        from tests.unit.learner.pipeline import Pipeline, fill

        other = Pipeline(tmp_path / "uninterrupted")
        fill(other, steps)
        trainer = NumpyTrainer()
        other.train(trainer, steps=steps, **sections)
        return trainer.weights

    return weights
