"""From a model's head to its logits: the operations of its forward pass after the head. Imports torch.

    logits = cap · tanh(factor · head(hidden) / cap)

Most models do nothing. Gemma caps (cap = 30), Cohere multiplies (factor = 0.0625), Granite divides by the setting with which HyperCLOVA X
multiplies. So the configuration only gives candidates: the model's own forward pass on chosen hidden states decides between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echo_schemas.errors import UserError

# Configuration keys of transformers' families. Which of them count, and how, is found by trying.
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# The largest logit of the trial: far above any cap, so that a cap shows.
_LARGEST = 100.0
_NUM_STATES = 3
# Largest difference in the trial that rounding explains, as a share of the largest logit.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
_HINT = "Choose another [policy] base. Known are heads without anything after them, capped ones (Gemma), scaled ones (Cohere, Granite)."


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The operations after the head; none by default. LogitTransform(0.5, 30.0) turns 20 into 30 · tanh(10 / 30) = 9.65."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits if self.factor == 1.0 else logits * self.factor
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def back_(self, gradient: Tensor, logits: Tensor, temperature: float) -> None:
        """Turn the gradient by what `self` gives into that by the head's output, in place. `logits`: what it gave, over `temperature`."""
        if self.cap is not None:
            gradient.mul_(1 - (logits * (temperature / self.cap)) ** 2)
        if self.factor != 1.0:
            gradient.mul_(self.factor)


def find_transform(causal_lm: Any) -> LogitTransform:
    """The transform that `causal_lm`, a model of transformers without an adapter, applies to what its head gives.

    Raises UserError for a model whose head cannot be separated, or that changes its logits in another way.
    """
    kind = causal_lm.config.model_type
    head, decoder = causal_lm.get_output_embeddings(), causal_lm.get_decoder()
    if head is None or decoder is None or decoder is causal_lm:
        raise UserError(f"A model of the type {kind} has no head apart from its layers, which the learner needs.", hint=_HINT)
    with torch.no_grad():
        hidden = _hidden_states(head)
        plain = head(hidden).float()
        try:
            own = _own_logits(causal_lm, decoder, hidden).float()
        except Exception as exc:  # the forward pass of any family, on something that it does not expect
            raise UserError(f"The head of a model of the type {kind} cannot be tried: {exc!r}.", hint=_HINT) from exc
        found = min(_candidates(causal_lm.config), key=lambda transform: _difference(transform(plain), own))
        if not _difference(found(plain), own) <= _TOLERANCE[hidden.dtype]:
            raise UserError(
                f"A model of the type {kind} changes its logits after the head in a way that the learner does not know: it would train "
                "with wrong log-probabilities.",
                hint=_HINT,
            )
    return found


def _candidates(config: Any) -> Iterator[LogitTransform]:
    text = config.get_text_config()
    factors, caps = _numbers(text, _FACTORS), _numbers(text, _CAPS)
    for factor, cap in itertools.product([1.0, *factors, *(1 / factor for factor in factors)], [None, *caps]):
        yield LogitTransform(factor, cap)


def _numbers(config: Any, names: tuple[str, ...]) -> list[float]:
    return [float(value) for name in names if isinstance(value := getattr(config, name, None), int | float) and value > 0]


def _hidden_states(head: nn.Module) -> Tensor:
    """A few hidden states whose largest logit is `_LARGEST`, the same for each call: [3, hidden size]."""
    weight: Any = head.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_NUM_STATES, weight.shape[1], generator=generator).to(weight)
    largest = float(head(hidden).abs().max())
    return hidden * (_LARGEST / largest) if largest > 0 else hidden


def _own_logits(causal_lm: Any, decoder: nn.Module, hidden: Tensor) -> Tensor:
    """The logits of the model's own forward pass if its layers returned `hidden`. Leaves the model as it was."""
    given = _Given(hidden.unsqueeze(0))
    decoder.forward = lambda *_, **__: given
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = causal_lm(input_ids=ids, use_cache=False).logits[0]
    finally:
        del decoder.forward
    return logits


class _Given:
    """Stands for the output of the layers: the hidden states by name or by index, and None for any other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def _difference(ours: Tensor, own: Tensor) -> float:
    """The largest difference, as a share of the largest logit; infinite for another shape."""
    if ours.shape != own.shape:
        return float("inf")
    return float((ours - own).abs().max() / own.abs().max().clamp(min=1.0))
