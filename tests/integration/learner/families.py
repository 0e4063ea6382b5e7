"""Tiny random models of many families, and what the learner makes of them against transformers' own forward pass. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from echo_learner.training.logits import find_transform
from echo_learner.training.policy_model import PolicyConfig, load_policy
from echo_schemas.records import WeightKind

# Weights so large that logits reach where a cap bends them.
_TINY: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "gemma2": {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 4.0},
    "granite": {"logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 0.5},
    "cohere": {"logit_scale": 0.0625},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
}
"""What a family adds to its configuration."""


def write_family(family: str, folder: str, **others: Any) -> None:
    """A tiny random model; `others`: what differs in its configuration."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_TINY, **OWN[family], **others})).save_pretrained(folder)


def family_difference(family: str, dtype: str, folder: str) -> float:
    """The largest difference between the learner's log-probabilities, of padded rows, and those of transformers' full forward pass."""
    write_family(family, folder)
    policy = load_policy(
        PolicyConfig(
            base=folder,
            base_name="tiny",
            kind=WeightKind.FULL,
            lora_r=8,
            lora_alpha=8,
            dtype=dtype,
            temperature=0.7,
            gradient_checkpointing=False,
            seed=1,
        )
    ).eval()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(getattr(torch, dtype)).eval()
    ids = torch.randint(3, 48, (2, 9))
    ids[1, 6:] = 0
    rows, columns = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 4, 8, 1, 5])
    with torch.no_grad():
        ours, _ = policy(ids, rows, columns)
        full = [model(input_ids=ids[row : row + 1, :length]).logits[0] for row, length in ((0, 9), (1, 6))]
    expected = torch.stack(
        [
            (full[row][column - 1].float() / 0.7).log_softmax(-1)[ids[row, column]]
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
    )
    return float((ours - expected).abs().max())


def load_with_shifted_logits(folder: str) -> None:
    """Look for the transform of a model that adds to its logits after the head."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_TINY)).save_pretrained(folder)
    find_transform(_Shifting.from_pretrained(folder))


class _Shifting(LlamaForCausalLM):  # type: ignore[misc]  # what transformers says of itself is not read
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = found.logits + torch.arange(48.0)
        return found
