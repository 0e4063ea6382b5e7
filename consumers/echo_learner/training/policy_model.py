"""The policy as a torch module that returns log-probabilities of chosen tokens, and as files. Imports torch, transformers, peft.

Rows are padded on the right and attention is causal, so padding influences no real token and no attention mask is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echo_learner.training.compiling import compile_layers
from echo_learner.training.cut import Cut
from echo_learner.training.head import Head
from echo_learner.training.logits import LogitTransform, find_transform
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind
from echo_tasks.base_models import resolve_base
from echo_tasks.experts import Routers
from echo_tasks.prompts import attention_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The policy's model. Snapshots hold `base_name` instead of the folder, which differs from machine to machine."""

    base: str
    base_name: str
    kind: WeightKind
    lora_r: int
    lora_alpha: int
    dtype: str
    temperature: float
    gradient_checkpointing: bool
    seed: int
    cut: Cut = field(default_factory=Cut)
    replay_experts: bool = False
    compile: bool = False


class PolicyModel(nn.Module):
    """A causal language model, seen through the log-probabilities of chosen tokens."""

    def __init__(
        self, causal_lm: nn.Module, transform: LogitTransform, temperature: float, cut: Cut, routers: Routers | None = None
    ) -> None:
        """`routers`: of `causal_lm`, if tokens are sent to the experts of their sampling (routing replay)."""
        super().__init__()
        self.routers = routers
        self.causal_lm = causal_lm
        layer = self._language_model.get_output_embeddings()
        self._head = Head(layer, transform, temperature, cut)
        # All pieces are one call of the layer: ZeRO-3 gathers a module's weights at each of its calls, in which all ranks take part, and
        # ranks with more tokens have more pieces.
        layer.forward = self._head.score

    @property
    def _language_model(self) -> Any:
        lm: Any = self.causal_lm
        return lm.get_base_model() if hasattr(lm, "get_base_model") else lm

    def forward(
        self, input_ids: Tensor, rows: Tensor, columns: Tensor, is_cut: Tensor | None = None, experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and, without gradient, entropy of each token `input_ids[rows[i], columns[i]]`, both [T], in nats.

        `input_ids` int64 [B, L], padded on the right with any id; `rows`, `columns` int64 [T], columns at least 1. Float32, after
        temperature. `is_cut` bool [T]: of the distribution after top_p, top_k and min_p; none: of the full one. Entropy is the full one's.
        `experts` [B, L, layers · experts a token]: where tokens go, -1 for the router's own choice; none: always its own.
        """
        if self.routers is not None:
            layers, per_token, _ = self.routers.shape
            self.routers.given = None if experts is None else experts.reshape(-1, layers, per_token)
        model = self._language_model
        hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        picked = hidden[rows, columns - 1]
        targets = input_ids[rows, columns]
        found: tuple[Tensor, Tensor] = model.get_output_embeddings()(picked, targets, is_cut)
        return found

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Switch the adapter off, so that the model is its starting policy. Only for adapters."""
        lm: Any = self.causal_lm
        with lm.disable_adapter():
            yield


def load_policy(config: PolicyConfig) -> PolicyModel:
    """The base model with a fresh adapter on every linear layer but the head, or with all weights trainable.

    The same seed gives the same adapter. Raises UserError if the folder holds no model, or one that cannot be trained here: no linear layer
    to adapt, a head that `find_transform` refuses, no experts where they are to be replayed, or layers that cannot be compiled.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    folder = resolve_base(config.base)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[config.dtype], local_files_only=True, attn_implementation=attention_of(folder)
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as exc:
        raise UserError(f"The model in {folder} cannot be loaded: {exc}", hint="Is every file of it there and complete?") from exc
    transform = find_transform(model)
    routers = Routers(model) if config.replay_experts else None
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.kind is WeightKind.LORA:
        model = _with_adapter(model, config)
    if config.compile:
        compile_layers(model)
    model.train()
    return PolicyModel(model, transform, config.temperature, config.cut, routers)


def _with_adapter(model: Any, config: PolicyConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    # No dropout: it would make the learner another policy than the sampler.
    lora = LoraConfig(
        r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=_targets(model), bias="none", task_type="CAUSAL_LM"
    )
    rng = torch.random.get_rng_state()
    torch.manual_seed(config.seed)
    try:
        return get_peft_model(model, lora)
    except ValueError as exc:
        raise UserError(f"This model takes no LoRA adapter: {exc}", hint='Set [policy] update = "full".') from exc
    finally:
        torch.random.set_rng_state(rng)


def _targets(model: Any) -> str | list[str]:
    """Every linear layer but the head. For a mixture, linear layers by name: PEFT would give its experts, one tensor of three dimensions,
    an adapter that no engine serves."""
    if all(parameter.dim() < 3 for parameter in model.parameters()):
        return "all-linear"
    head = model.get_output_embeddings()
    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    )


def snapshot_config(model: PolicyModel, config: PolicyConfig) -> str:
    """The configuration in a snapshot: of the adapter, or of the model."""
    lm: Any = model.causal_lm
    content: dict[str, Any]
    if config.kind is WeightKind.LORA:
        given = {**asdict(lm.peft_config["default"]), "base_model_name_or_path": config.base_name}
        content = {name: value for name, value in given.items() if value is not None}
    else:
        content = {**lm.config.to_dict(), "_name_or_path": config.base_name}
    return json.dumps(
        content, sort_keys=True, indent=1, default=lambda value: sorted(value) if isinstance(value, set | frozenset) else str(value)
    )


def snapshot_names(model: PolicyModel, kind: WeightKind) -> dict[str, str]:
    """From the name of each trained parameter in `model` to its name in a snapshot. Tied parameters occur once, as they do on disk."""
    names = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inner = name.removeprefix("causal_lm.")
            # PEFT saves names without the adapter's name.
            names[name] = inner.replace(".default.", ".") if kind is WeightKind.LORA else inner
    return names
