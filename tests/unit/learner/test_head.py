"""A head in pieces, whose derivative is written out, gives what autograd gives for the whole head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echo_learner.training.cut import Cut
from echo_learner.training.head import Head
from echo_learner.training.logits import LogitTransform

ROWS, SIZE, VOCABULARY = 11, 6, 17


def scored(at_once: int, transform: LogitTransform, temperature: float, *, has_cut: bool, bias: bool) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of a weighted sum of the former by hidden states, weights and bias."""
    torch.manual_seed(3)
    layer = nn.Linear(SIZE, VOCABULARY, bias=bias, dtype=torch.float64)
    hidden = (3 * torch.randn(ROWS, SIZE, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    head = Head(layer, transform, temperature, Cut(top_p=0.8))
    head.num_rows_at_once = at_once
    logprobs, entropies = head.score(hidden, targets, torch.arange(ROWS) % 2 == 0 if has_cut else None)
    (logprobs * torch.linspace(-1, 1, ROWS)).sum().backward()
    gradients = [hidden.grad, *(parameter.grad for parameter in layer.parameters())]
    return [logprobs.detach(), entropies, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5), LogitTransform(2.0, 3.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_cut", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_pieces_are_the_whole(transform: LogitTransform, temperature: float, *, has_cut: bool, bias: bool) -> None:
    whole = scored(ROWS, transform, temperature, has_cut=has_cut, bias=bias)
    pieces = scored(4, transform, temperature, has_cut=has_cut, bias=bias)
    assert len(whole) == (5 if bias else 4)
    for one, other in zip(whole, pieces, strict=True):
        # Float32 in between: some roundings of the largest gradient.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * max(1.0, float(one.abs().max())))
