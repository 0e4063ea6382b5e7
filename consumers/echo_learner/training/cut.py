"""Finds from the learner's logits the tokens that sampling could draw under top_p, top_k and min_p. Imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`min_p`, then `top_k`, then `top_p`, as the engines apply them (docs/engines.md). The defaults cut nothing.

    Cut(top_p=0.6) keeps of the probabilities 0.5, 0.3 and 0.2 the first two: 0.5 is not enough, 0.8 is. The log-probability of the first is
    then log(0.5 / 0.8).
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """`logits` [T, V] after temperature, float32, with -inf at the tokens that could not be drawn; never at `targets` int64 [T].

        A drawn token is always kept, even if rounding or newer weights would cut it now. The choice of tokens has no gradient.
        """
        with torch.no_grad():
            kept = logits >= self._least(logits).unsqueeze(1)
            kept.scatter_(1, targets.unsqueeze(1), value=True)
        return logits.masked_fill(~kept, -math.inf)

    def _least(self, logits: Tensor) -> Tensor:
        """The least logit that is kept, [T]."""
        num_kept = min(self.top_k or logits.shape[1], logits.shape[1])
        least = torch.full_like(logits[:, 0], -math.inf)
        if self.min_p > 0:
            least = logits.max(dim=1).values + math.log(self.min_p)
        if self.top_p >= 1:
            return torch.maximum(least, logits.topk(num_kept, dim=1).values[:, -1]) if self.top_k else least
        ordered = logits.topk(num_kept, dim=1).values if self.top_k else logits.sort(dim=1, descending=True).values
        probabilities = ordered.masked_fill(ordered < least.unsqueeze(1), -math.inf).softmax(dim=1)
        before = probabilities.cumsum(dim=1) - probabilities
        last = (before < self.top_p).sum(dim=1, keepdim=True) - 1
        return torch.maximum(least, ordered.gather(1, last).squeeze(1))
