"""Which experts tokens go to, in a mixture of experts of transformers: noted as they are sampled, replayed as they are trained (R3,
arXiv 2510.11370). Imports torch.

A router scores all experts and chooses with one `topk`. Noting reads its choice. Replaying replaces the choice; the weights of the chosen
experts still come from the present scores, with their gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echo_schemas.errors import UserError

OWN = -1
"""In place of an expert's number: the router's own choice."""


class Routers:
    """The routers of one model, whose forward passes go through here from now on. One thread uses it.

    `shape`: layers, experts a token, experts. `given` int64 [N, layers, experts a token] or None: what the next passes over N tokens
    replay; it must stay until their backward pass, which computes layers again where activations are not kept.
    """

    def __init__(self, causal_lm: Any) -> None:
        """`causal_lm`: a model of transformers without an adapter. Raises UserError if it is no mixture whose routers are known."""
        target = getattr((getattr(causal_lm, "_can_record_outputs", None) or {}).get("router_logits"), "target_class", ())
        found = {name: module for name, module in causal_lm.named_modules() if isinstance(module, target) and hasattr(module, "top_k")}
        if not found:
            raise UserError(
                f"[policy] replay_experts is for mixtures of experts, and a model of the type {causal_lm.config.model_type} is none whose "
                "routers are known.",
                hint="Set it to false, or choose another [policy] base.",
            )
        layers = int(causal_lm.config.get_text_config().num_hidden_layers)
        first = next(iter(found.values()))
        self.shape = (layers, int(first.top_k), int(first.weight.shape[0]))
        self.given: Tensor | None = None
        self._noted: dict[int, Tensor] = {}
        for name, module in found.items():
            layer = next(int(part) for part in name.split(".") if part.isdigit())
            module.forward = partial(self._pass, layer, module.forward)

    def noted(self) -> Tensor:
        """Where the tokens of the last pass went, [N, layers, experts a token], int64; zeros in layers without experts."""
        layers, per_token, _ = self.shape
        first = next(iter(self._noted.values()))
        nothing = first.new_zeros(len(first), per_token)
        return torch.stack([self._noted.get(layer, nothing) for layer in range(layers)], dim=1)

    def _pass(self, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with _Choice(self, layer):
            return forward(*args, **kwargs)

    def chosen(self, layer: int, scores: Tensor, own: Tensor) -> Tensor | None:
        """The experts [N, experts a token] in place of a router's `own` choice by `scores` [N, experts]; None: the own choice stays."""
        _, per_token, num_experts = self.shape
        if (scores.shape[-1], own.shape[-1]) != (num_experts, per_token):
            # A `topk` among groups of experts.
            return None
        if self.given is None:
            self._noted[layer] = own
            return None
        given = self.given[:, layer].to(own.device)
        return torch.where(given == OWN, own, given)


class _Choice(TorchFunctionMode):
    """Intercepts each `topk` inside."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers = routers
        self._layer = layer

    def __torch_function__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in {torch.topk, Tensor.topk}:
            return found
        chosen = self._routers.chosen(self._layer, args[0], found[1])
        return found if chosen is None else (args[0].gather(-1, chosen), chosen)
