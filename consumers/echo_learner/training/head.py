"""From the last hidden states to log-probabilities of chosen tokens, without the logits of all of them at once. Imports torch.

Logits are as wide as the vocabulary: of 8,192 tokens and Qwen's vocabulary 5 GB in float32. So the head's product, and all that is
computed from it, is made for some rows at a time, and again in the backward pass. Its derivative is written out, because autograd would
keep and move several more copies of each piece, and would add up the pieces' gradients in the weights' type:

    d logprob_target / d logit_j = [j = target] − p_j,   p the distribution that the token was drawn from
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echo_learner.losses.token_sums import entropy_of_logits, entropy_of_logprobs
from echo_learner.training.cut import Cut
from echo_learner.training.logits import LogitTransform

# Logits of one piece: 256 MiB in float32.
_LOGITS_AT_ONCE = 1 << 26


class Head:
    """A model's output layer, and what comes after it."""

    def __init__(self, layer: nn.Linear, transform: LogitTransform, temperature: float, cut: Cut) -> None:
        """Before DeepSpeed: under ZeRO-3 the layer's weights are spread over ranks later, and its shape is lost."""
        self.layer = layer
        self.transform = transform
        self.temperature = temperature
        self.cut = cut
        self.num_rows_at_once = max(1, _LOGITS_AT_ONCE // layer.weight.shape[0])

    def score(self, hidden: Tensor, targets: Tensor, is_cut: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-probability and, without gradient, entropy of `targets` int64 [T] after `hidden` [T, hidden size], both float32 [T], in nats.

        `is_cut` bool [T]: log-probabilities of the distribution after top_p, top_k and min_p; none: of the full one, as the entropy is.
        """
        if len(targets) > self.num_rows_at_once:
            found: tuple[Tensor, Tensor] = _Pieces.apply(hidden, self.layer.weight, self.layer.bias, targets, is_cut, self)  # type: ignore[no-untyped-call]
            return found
        logits = self.logits(hidden)
        logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - self.drawn_from(logits, targets, is_cut).logsumexp(dim=1)
        with torch.no_grad():
            return logprobs, entropy_of_logits(logits)

    def pieces(self, num_rows: int) -> list[slice]:
        """The rows that are computed together."""
        return [slice(start, start + self.num_rows_at_once) for start in range(0, num_rows, self.num_rows_at_once)]

    def logits(self, hidden: Tensor) -> Tensor:
        """After transform and temperature, float32 [T, V]."""
        logits = self.transform(nn.functional.linear(hidden, self.layer.weight, self.layer.bias).float())
        return logits if self.temperature == 1.0 else logits / self.temperature

    def drawn_from(self, logits: Tensor, targets: Tensor, is_cut: Tensor | None) -> Tensor:
        """`logits` with -inf where a token that `is_cut` could not be drawn."""
        return logits if is_cut is None else torch.where(is_cut.unsqueeze(1), self.cut(logits, targets), logits)


class _Pieces(torch.autograd.Function):
    """`Head.score`, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, is_cut: Tensor | None, head: Head
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        log_sums = torch.empty_like(logprobs)
        for piece in head.pieces(len(targets)):
            logits = head.logits(hidden[piece])
            chosen = logits.gather(1, targets[piece].unsqueeze(1)).squeeze(1)
            of_all = torch.log_softmax(logits, dim=1)
            if is_cut is None:
                logprobs[piece] = of_all.gather(1, targets[piece].unsqueeze(1)).squeeze(1)
            else:
                logprobs[piece] = chosen - head.drawn_from(logits, targets[piece], is_cut[piece]).logsumexp(dim=1)
            log_sums[piece] = chosen - logprobs[piece]
            entropies[piece] = entropy_of_logprobs(of_all)
        ctx.head = head
        ctx.save_for_backward(hidden, targets, is_cut, log_sums)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        head: Head = ctx.head
        hidden, targets, is_cut, log_sums = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight = head.layer.weight
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=hidden.device) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=hidden.device) if ctx.needs_input_grad[2] else None
        for piece in head.pieces(len(targets)):
            logits = head.logits(hidden[piece])
            drawn_from = head.drawn_from(logits, targets[piece], None if is_cut is None else is_cut[piece])
            scale = gradients[0][piece].unsqueeze(1) / head.temperature
            of_logits = (drawn_from - log_sums[piece].unsqueeze(1)).exp_().mul_(-scale)
            of_logits.scatter_add_(1, targets[piece].unsqueeze(1), scale)
            head.transform.back_(of_logits, logits, head.temperature)
            short = of_logits.to(weight.dtype)
            if of_hidden is not None:
                of_hidden[piece] = short @ weight
            if of_weight is not None:
                of_weight += short.T @ hidden[piece]
            if of_bias is not None:
                of_bias += of_logits.sum(dim=0)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            None,
            None,
            None,
        )
