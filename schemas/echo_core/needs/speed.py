"""Seconds of a training step and rollouts per second of a worker on a kind of GPU, by roofline. Pure.

Training: forward 2 and backward 4 operations a weight and token (Kaplan et al., arXiv 2001.08361, §2.1), attention 2 · width · context more
for each layer, and then the memory traffic of all that is no matrix product, in readings of the activations. The four figures below were
fitted to seven steps measured on an H100 (`bench/gpu.py`; docs/benchmarks.md), which they give within an eighth; on other GPUs they are
assumptions. Decoding reads all weights and every sequence's keys and values once for each token, at the share of the memory's bandwidth
that engines reach: an assumption. A measured run gives better figures (`echoswarm plan --from-run`)."""

from __future__ import annotations

from dataclasses import dataclass

from echo_core.needs.memory import ITEM_BYTES, WorkerLoad, layer_activation_bytes, worker_memory
from echo_core.needs.model_shape import ModelShape

MATRIX_SHARE = 0.6
"""Of the peak, in training's matrix products."""
FORWARD_READINGS, BACKWARD_READINGS = 5, 20
"""How often a pass reads or writes the bytes of all activations (`layer_activation_bytes`) besides its matrix products."""
COMPILED_SHARE = 0.55
"""Of those, what `[learner] compile` leaves."""
LOGIT_READINGS = 24
"""How often a step reads or writes float32 logits."""
BANDWIDTH_SHARE, DECODING_SHARE = 0.6, 0.4
"""Of the memory's bandwidth and of the peak, in decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU. `memory`: bytes; `flops`: dense bfloat16 operations per second at its peak; `bandwidth`: bytes per second."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    price_per_hour: float | None = None


GPUS = (
    Gpu(name="RTX 4090 24 GB", memory=24e9, flops=165e12, bandwidth=1.008e12),
    Gpu(name="RTX 5090 32 GB", memory=32e9, flops=210e12, bandwidth=1.792e12, price_per_hour=0.35),
    Gpu(name="L40S 48 GB", memory=48e9, flops=362e12, bandwidth=0.864e12),
    Gpu(name="A100 80 GB", memory=80e9, flops=312e12, bandwidth=2.039e12, price_per_hour=3.06),
    Gpu(name="H100 80 GB", memory=80e9, flops=989e12, bandwidth=3.35e12),
    Gpu(name="H200 141 GB", memory=141e9, flops=989e12, bandwidth=4.8e12),
)
"""NVIDIA's data sheets; prices in dollars where ECHO-2 (§5.1) has them: of 28 January 2026, Google Cloud and vast.ai."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step. `rollouts`: samples of it; tokens of a mean sample; `updates`: optimizer updates of a step."""

    rollouts: int
    prompt_tokens: float
    answer_tokens: float
    updates: int = 1
    trains_adapter: bool = False
    recomputes: bool = False
    has_reference: bool = False
    compiles: bool = False
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> float:
        """Of a step."""
        return self.rollouts * (self.prompt_tokens + self.answer_tokens)


def train_s(shape: ModelShape, work: Workload, gpu: Gpu, ranks: int) -> float:
    """T_train on `ranks` GPUs.

    Forward passes: 1, 1 more if activations are recomputed, 1 for the reference, and (u - 1) / u for the log-probabilities before the
    updates after the first. The backward pass has the operations of 2 of them (an adapter: of 1, its base has no gradients).

    Qwen3-8B, 2048 samples of 256 + 4096 tokens, 2 updates, recomputed, 4 A100: 8.91e6 tokens · (2 · 7.57e9 + 2 · 36 · 4096 · 4352) · 4.5 =
    6.59e17 operations at 4 · 187e12 a second, 880 s; 8.91e6 · (36 · 184,320 · (2.5 · 5 + 20) + 151,936 · 4 · 24) B = 2.05e15 B at
    4 · 2.039e12 a second, 252 s; together 1132 s. The paper measured 1631 s (ECHO-2, §5.2; the lengths of its answers are not given).
    """
    forward = 1 + work.recomputes + work.has_reference + (work.updates - 1) / work.updates
    passes = forward + (1.0 if work.trains_adapter else 2.0)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * (work.prompt_tokens + work.answer_tokens)
    operations = (2 * shape.active_parameters + attention) * passes
    readings = (FORWARD_READINGS * forward + BACKWARD_READINGS) * (COMPILED_SHARE if work.compiles else 1.0)
    in_layers = shape.layers * layer_activation_bytes(shape, ITEM_BYTES[work.dtype]) * readings
    in_head = 4 * shape.vocabulary * LOGIT_READINGS
    a_token = operations / (gpu.flops * MATRIX_SHARE) + (in_layers + in_head) / gpu.bandwidth
    return work.tokens * a_token / ranks


def rollouts_per_s(shape: ModelShape, work: Workload, gpu: Gpu, load: WorkerLoad) -> float:
    """Rollouts per second of a worker on `load.gpus` such GPUs; 0 if no sequence fits.

    As many sequences run at once as fit at the mean length of an unfinished sample (prompt and half of the answer), `sequences` at most.

    Qwen3-8B, 256 + 4096 tokens on an RTX 5090, 64 at once: keys and values of 2304 tokens are 340 MB, and 9.4 GB hold 27 such; a token of
    all takes (16.4 + 27 · 0.340 GB) / 1.075e12 = 23.8 ms, so 1136 tokens/s and 0.277 rollouts/s. Inferred of the paper: 0.274.
    """
    memory, mean = worker_memory(shape, load), work.prompt_tokens + work.answer_tokens / 2
    room = memory.cache_room(gpu.memory, load.share)
    at_once = min(float(load.sequences), room // (memory.cache_per_token * mean))
    if room < memory.cache_least or at_once < 1:
        return 0.0
    # Many sequences together use all experts of a mixture.
    touched = min(shape.parameters, shape.active_parameters * at_once) * ITEM_BYTES[load.dtype] / load.gpus
    read_s = (touched + at_once * memory.cache_per_token * mean) / (gpu.bandwidth * BANDWIDTH_SHARE)
    compute_s = 2 * shape.active_parameters * at_once / load.gpus / (gpu.flops * DECODING_SHARE)
    return at_once / (max(read_s, compute_s) * work.answer_tokens)
