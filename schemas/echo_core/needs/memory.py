"""GPU memory of a learner's rank and of a worker, part by part, in bytes. Pure.

Weights, gradients and optimizer follow ZeRO (arXiv 1910.02054, §3): of bfloat16 weights 2 bytes, a float32 master copy 4, Adam's moments 8,
and gradients summed up in float32 4, as the learner tells DeepSpeed. Activations follow Korthikanti et al. (arXiv 2205.05198, §4), counted
for a gated feed-forward part, grouped heads, and attention that keeps no matrix of scores. They are estimates: a tenth is added to a
learner's sum for memory that allocators waste; an engine allocates its memory at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_core.needs.model_shape import ModelShape

STATE_BYTES = {"float32": 16, "bfloat16": 18}
"""Of one trained weight: weight, master copy (bfloat16), gradient, Adam's two moments."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# CUDA's context, cuBLAS, NCCL: memory of a process before the first tensor.
_CONTEXT_BYTES = 1_500_000_000
# An engine's buffers for a batch of prompts.
_ENGINE_BYTES = 1_500_000_000
_LOST = 1.1
# Logits of one piece of the head, as the learner cuts them (`policy_model`): about four copies at once, and four more to sort for a cut.
_LOGITS_AT_ONCE, _LOGIT_COPIES, _CUT_COPIES = 1 << 26, 4, 4
# The copies of published versions that the learner keeps to compare workers with, at most (`trainer`).
_MOST_COPIES_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoad:
    """The work of a rank. `tokens`: of one forward pass, padding included; `stage`: ZeRO's; `copies`: published versions kept."""

    dtype: str
    adapter_rank: int
    """0: all weights are trained."""
    tokens: int
    ranks: int
    stage: int
    recomputes: bool
    has_reference: bool
    copies: int
    cuts: bool
    offloads: bool = False
    """Whether DeepSpeed keeps the optimizer in the machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes on one rank's GPU."""

    weights: int
    optimizer: int
    """Master copies, gradients and moments of the trained weights."""
    reference: int
    copies: int
    activations: int
    logits: int
    host: int = 0
    """Of the optimizer, in the machine's memory."""

    @property
    def total(self) -> int:
        """All, with the waste of allocators, and the context."""
        parts = self.weights + self.optimizer + self.reference + self.copies + self.activations + self.logits
        return math.ceil(parts * _LOST) + _CONTEXT_BYTES


def learner_memory(shape: ModelShape, load: LearnerLoad) -> LearnerMemory:
    """Of each rank; all ranks need the same.

    Qwen3-8B, all weights in bfloat16, 4 ranks, ZeRO-3, 16384 tokens recomputed, no reference: weights 16.38 GB / 4 = 4.10; optimizer
    16 bytes · 8.19e9 / 4 = 32.8 GB; activations 36 · 16384 · 8192 B for the layers' inputs = 4.83 GB and one whole layer
    16384 · 184,320 B = 3.02 GB; logits 4 · 2^26 · 4 B = 1.07 GB. Together 45.8 GB, with losses and context 51.8 GB: an 80 GB GPU."""
    item = ITEM_BYTES[load.dtype]
    trained = shape.adapter_parameters(load.adapter_rank) if load.adapter_rank else shape.parameters
    per_rank = {0: (1, 1, 1), 1: (1, 1, load.ranks), 2: (1, load.ranks, load.ranks), 3: (load.ranks, load.ranks, load.ranks)}[load.stage]
    weights = shape.parameters * item // per_rank[0] + (trained * item if load.adapter_rank else 0)
    gradients, rest = 4, STATE_BYTES[load.dtype] - item - 4
    optimizer = trained * gradients // per_rank[1] + trained * rest // per_rank[2]
    kept = trained * item
    has_copies = load.stage < 3 and kept <= _MOST_COPIES_BYTES
    return LearnerMemory(
        weights=weights,
        optimizer=0 if load.offloads else optimizer,
        host=optimizer if load.offloads else 0,
        reference=shape.parameters * item if load.has_reference and not load.adapter_rank else 0,
        copies=min(load.copies * kept, _MOST_COPIES_BYTES) if has_copies else 0,
        activations=_activations(shape, load.tokens, item, recomputes=load.recomputes),
        logits=min(load.tokens * shape.vocabulary, _LOGITS_AT_ONCE) * 4 * (_LOGIT_COPIES + _CUT_COPIES * load.cuts),
    )


def _activations(shape: ModelShape, tokens: int, item: int, *, recomputes: bool) -> int:
    """Bytes kept for the backward pass: with recomputation all but one layer keep only their input."""
    per_token = layer_activation_bytes(shape, item)
    if not recomputes:
        return tokens * per_token * shape.layers
    return tokens * (shape.layers * item * shape.hidden + per_token)


def layer_activation_bytes(shape: ModelShape, item: int) -> int:
    """Of one token in one layer: its inputs to norms in float32, both norms' outputs, q, k, v, the output of attention, and the
    feed-forward part's gate, its activation, the other half and their product, of `item` bytes each.

    Qwen3-8B in bfloat16: 2 · (4 · 4096 + 2 · 4096 + 2 · 1024 + 4 · 12288) + 8 · 4096 = 184,320 B."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = shape.intermediate * max(1, shape.experts_per_token)
    return item * (4 * shape.hidden + 2 * q + 2 * kv + 4 * wide) + 8 * shape.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The work of a worker. `sequences`: at once, at most; `length`: of the longest, prompt included; `share`: of its GPUs' memory that it
    may use; `gpus`: of one copy of the model; `loaded_adapters`: versions that may be under way."""

    dtype: str
    adapter_rank: int
    sequences: int
    length: int
    gpus: int = 1
    share: float = 0.9
    loaded_adapters: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes on one of a worker's GPUs."""

    weights: int
    adapters: int
    cache_per_token: int
    cache_wanted: int
    """For all sequences at full length; with less, fewer run at once."""
    cache_least: int
    """For one sequence at full length: with less the engine does not start."""

    @property
    def least(self) -> int:
        """Bytes that must fit."""
        return self.weights + self.adapters + self.cache_least + _ENGINE_BYTES + _CONTEXT_BYTES

    def cache_room(self, memory: float, share: float) -> float:
        """Bytes that a GPU of `memory` bytes leaves for keys and values; below 0 if the weights do not fit."""
        return memory * share - self.weights - self.adapters - _ENGINE_BYTES - _CONTEXT_BYTES


def worker_memory(shape: ModelShape, load: WorkerLoad) -> WorkerMemory:
    """Of each GPU of a worker.

    Qwen3-8B in bfloat16 on one GPU, 64 sequences of 9216 tokens: weights 16.4 GB; a token's keys and values 147,456 B, so one sequence
    1.36 GB and all 87.0 GB. On 32 GB at a share of 0.9 there is room for 28.8 - 16.4 - 3.0 = 9.4 GB: 6.9 sequences at full length."""
    item = ITEM_BYTES[load.dtype]
    cache = shape.cache_bytes(item)
    adapters = shape.adapter_parameters(load.adapter_rank) * item * load.loaded_adapters if load.adapter_rank else 0
    return WorkerMemory(
        weights=shape.parameters * item // load.gpus,
        adapters=adapters // load.gpus,
        cache_per_token=cache // load.gpus,
        cache_wanted=cache * load.length * load.sequences // load.gpus,
        cache_least=cache * load.length // load.gpus,
    )
