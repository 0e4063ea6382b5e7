"""However an update is cut into micro-batches, the policy gets the gradient of the uncut update."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.losses.catalogue import build_loss, loss_names, parse_loss
from echo_learner.losses.config import ReferenceKl
from echo_learner.losses.interface import LossInputs
from echo_learner.training.microbatches import MicroBatch, plan_micro_batches
from tests.thorough import examples

_VOCABULARY = 5


class _Update:
    """Samples of one update and a policy over five tokens: the log-probabilities are rows of one trainable table."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.logits = torch.randn(max(lengths), _VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
        self.tokens = [torch.randint(_VOCABULARY, (length,), generator=generator) for length in lengths]
        self.noise = [torch.randn(4, length, generator=generator, dtype=torch.float64) for length in lengths]
        self.masks = [torch.rand(length, generator=generator) > 0.2 for length in lengths]

    def inputs(self, samples: MicroBatch, mode: Normalisation) -> LossInputs:
        """The forward pass of a micro-batch. The scales are those of the whole update."""
        logprobs = torch.log_softmax(self.logits, dim=-1)
        learner = torch.cat([logprobs[torch.arange(self.lengths[i]), self.tokens[i]] for i in samples])
        noise = torch.cat([self.noise[i] for i in samples], dim=1)
        lengths = torch.tensor([self.lengths[i] for i in samples])
        fixed = learner.detach()
        return LossInputs(
            learner=learner,
            sampler=fixed + 0.3 * noise[0],
            previous=fixed + 0.1 * noise[1],
            reference=fixed + 0.3 * noise[2],
            advantages=noise[3],
            mask=torch.cat([self.masks[i] for i in samples]),
            sequence_ids=torch.repeat_interleave(torch.arange(len(samples)), lengths),
            sequence_lengths=lengths,
            sequence_scales=torch.from_numpy(sequence_scales(np.array(self.lengths), mode, constant=7)[list(samples)]),
        )

    def gradient(self, cut: tuple[MicroBatch, ...], name: str, mode: Normalisation) -> torch.Tensor:
        """Accumulated over the micro-batches, as an optimizer would see it."""
        loss = build_loss(parse_loss(name), ReferenceKl(coef=0.1))
        gradients = [torch.autograd.grad(loss(self.inputs(samples, mode)).loss, self.logits)[0] for samples in cut]
        return torch.stack(gradients).sum(dim=0)


@settings(max_examples=examples(80))
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=10),
    max_tokens=st.integers(1, 40),
    mode=st.sampled_from(Normalisation),
    name=st.sampled_from(loss_names()),
    seed=st.integers(0, 1000),
)
def test_micro_batches_add_up_to_the_gradient_of_the_uncut_update(
    lengths: list[int], max_tokens: int, mode: Normalisation, name: str, seed: int
) -> None:
    update = _Update(lengths, seed)
    plan = plan_micro_batches(lengths, [1] * len(lengths), num_updates=1, max_tokens=max_tokens)
    cut = update.gradient(plan.updates[0], name, mode)
    uncut = update.gradient((tuple(range(len(lengths))),), name, mode)
    torch.testing.assert_close(cut, uncut, rtol=1e-9, atol=1e-12)
