"""A decoder's sizes: its weights, the weights that a token uses, its key-value cache. Pure.

Llama's layout (arXiv 2302.13971) with the additions of Qwen2 (biases of q, k, v), Qwen3 (norms of q and k) and mixtures of experts; for
families with small differences (Gemma's extra norms) the error is about a per mille."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_schemas.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Qwen3-8B: 36 layers of width 4096, 32 heads of 128 over 8 of keys and values, feed-forward 12288, 151936 tokens, not tied.

    Its layer has 2 · 4096 · 4096 (q, o) + 2 · 4096 · 1024 (k, v) + 3 · 4096 · 12288 + 8448 (norms) = 192,946,432 weights; 36 of them,
    2 · 151936 · 4096 for embeddings and head, and 4096 for the last norm are 8,190,735,360."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the feed-forward part, or of one expert."""
    vocabulary: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        """All weights."""
        return self._with_experts(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token uses, without the embedding's table."""
        return self._with_experts(self.experts_per_token) - (0 if self.is_tied else self.vocabulary * self.hidden)

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter on every linear layer but the head: rank · (in + out) for each. Experts lie in one tensor and get no adapter.

        Qwen3-8B, rank 32: 32 · (2 · 8192 + 2 · 5120 + 3 · 16384) · 36 layers = 87,293,952."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + q) + 2 * (self.hidden + kv)
        feed_forward = 0 if self.experts else 3 * (self.hidden + self.intermediate)
        return rank * (attention + feed_forward) * self.layers

    def cache_bytes(self, item_bytes: int) -> int:
        """Keys and values of one token. Qwen3-8B in bfloat16: 2 · 36 · 8 · 128 · 2 = 147,456."""
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes

    def _with_experts(self, number: int) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * q + 2 * self.hidden * kv
        small = 2 * self.hidden + (q + 2 * kv) * self.has_qkv_bias + 2 * self.head_dim * self.has_qk_norm
        one = 3 * self.hidden * self.intermediate
        feed_forward = number * one + self.hidden * self.experts if self.experts else one
        tables = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return self.layers * (attention + small + feed_forward) + tables + self.hidden


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a model folder's config.json. Raises UserError unless it describes such a decoder."""
    text = config.get("text_config", config)
    kind = str(text.get("model_type", config.get("model_type", "")))
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        return ModelShape(
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int((experts and text.get("moe_intermediate_size")) or text["intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            has_qkv_bias=kind.startswith("qwen2"),
            has_qk_norm=kind.startswith("qwen3"),
            experts=experts,
            experts_per_token=int(text.get("num_experts_per_tok") or 0),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise UserError(
            f"The model's config.json does not say its shape: {type(exc).__name__} {exc}.",
            hint="Estimates are made for decoders with hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size.",
        ) from exc


def _qwen(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **rest: Any) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        **{"head_dim": 128, "vocabulary": 151_936, "is_tied": False, **rest},
    )  # fmt: skip


PUBLISHED: Mapping[str, ModelShape] = {
    "Qwen2.5-0.5B": _qwen(24, 896, 4864, 14, 2, head_dim=64, is_tied=True, has_qkv_bias=True),
    "Qwen2.5-1.5B": _qwen(28, 1536, 8960, 12, 2, is_tied=True, has_qkv_bias=True),
    "Qwen2.5-3B": _qwen(36, 2048, 11008, 16, 2, is_tied=True, has_qkv_bias=True),
    "Qwen2.5-7B": _qwen(28, 3584, 18944, 28, 4, vocabulary=152_064, has_qkv_bias=True),
    "Qwen3-0.6B": _qwen(28, 1024, 3072, 16, 8, is_tied=True, has_qk_norm=True),
    "Qwen3-1.7B": _qwen(28, 2048, 6144, 16, 8, is_tied=True, has_qk_norm=True),
    "Qwen3-4B": _qwen(36, 2560, 9728, 32, 8, is_tied=True, has_qk_norm=True),
    "Qwen3-8B": _qwen(36, 4096, 12288, 32, 8, has_qk_norm=True),
    "Qwen3-14B": _qwen(40, 5120, 17408, 40, 8, has_qk_norm=True),
    "Qwen3-32B": _qwen(64, 5120, 25600, 64, 8, has_qk_norm=True),
    "Qwen3-30B-A3B": _qwen(48, 2048, 768, 32, 4, has_qk_norm=True, experts=128, experts_per_token=8),
}
"""The models of the examples, from the config.json of Qwen/<name> on Hugging Face."""


def published_shape(name: str) -> ModelShape | None:
    """The shape of the model with this name or path. A variant (`-Instruct`, `-Base`, `-Thinking-2507`) has its model's shape: the longest
    matching name counts."""
    last = name.rstrip("/").rpartition("/")[2]
    fitting = [known for known in PUBLISHED if last == known or last.startswith(f"{known}-")]
    return PUBLISHED[max(fitting, key=len)] if fitting else None
