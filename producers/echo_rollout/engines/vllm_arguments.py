"""What the vLLM engines pass to vLLM and read from it: arguments, sampling, outputs. Imports vllm inside its functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_rollout.engines.engine import EngineCapabilities, EngineConfig, Generation, SnapshotRef, Switch
from echo_rollout.engines.pipeline import plan_split, set_stages, stage_arguments
from echo_schemas.errors import UserError
from echo_schemas.records import FinishReason, LogprobDistribution, LogprobSource, Sampling, VersionSpan, WeightKind

IN_PROCESS = "in_process"
"""The one option of [rollout.options] that is not an argument of vLLM."""
WORKER_EXTENSION = "echo_rollout.engines.vllm_worker.WorkerExtension"
Decode = Callable[[Sequence[Sequence[int]]], list[str]]

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM serves; an adapter in between is served under the next one."""
_KV_CACHE_BYTES = 256 << 20
# Versions that may have generations at once: the new one and three older ones.
_MAX_ADAPTERS = 4
_MIN_BATCHED_TOKENS = 2048
_LOGPROBS_MODE = "logprobs_mode"
# What the learner computes with: log-probabilities after temperature and cuts, or those of the model as it is.
_PROCESSED, _RAW = "processed_logprobs", "raw_logprobs"
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def set_environment(*, in_process: bool) -> None:
    """What vLLM reads from the environment while it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A fork of a process that has looked for a GPU cannot use it, and the worker has threads, of which a fork has only one.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def bind_engine_thread() -> None:
    """Keep the calling thread, and what it starts, on the cores of VLLM_CPU_OMP_THREADS_BIND: vLLM reads it for its own processes only."""
    cores = cores_of(os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""))
    if cores and hasattr(os, "sched_setaffinity") and not has_gpu():
        # A process that may not use these cores keeps its own.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def cores_of(text: str) -> set[int]:
    """`0-2,5` → {0, 1, 2, 5}; the empty set for words such as `auto` and `nobind`, and for several ranks."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def has_gpu() -> bool:
    """Is there a CUDA device?"""
    return num_gpus() > 0


def num_gpus() -> int:
    """CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def max_rank(config: EngineConfig) -> int:
    """The highest rank the engine is opened for. Raises UserError above vLLM's own limit."""
    rank = next((rank for rank in _RANKS if rank >= config.lora_rank), None)
    if rank is None:
        raise UserError(f"vLLM serves adapters of rank {_RANKS[-1]} at most, and [policy.lora] r is {config.lora_rank}.")
    return rank


def capabilities_of(config: EngineConfig) -> EngineCapabilities:
    """LoRA switches while old generations finish; full weights are loaded when nothing runs. Log-probabilities as vLLM's `logprobs_mode`
    says: processed (after temperature and cuts) or raw. Raises UserError for one that gives logits."""
    mode = config.options.get(_LOGPROBS_MODE, _PROCESSED)
    if mode not in {_PROCESSED, _RAW}:
        raise UserError(
            f"[rollout.options] logprobs_mode is {mode!r}, and the learner needs log-probabilities.",
            hint=f"Write {_PROCESSED!r} or {_RAW!r}.",
        )
    is_lora, is_raw = config.kind is WeightKind.LORA, mode == _RAW
    return EngineCapabilities(
        name="vllm",
        lora=is_lora,
        full=not is_lora,
        switch=Switch.KEEPS if is_lora else Switch.DRAINS,
        max_tokens=config.max_length,
        distribution=LogprobDistribution.FULL if is_raw else LogprobDistribution.DRAWN,
        before_temperature=is_raw,
    )


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """vLLM's EngineArgs; [rollout.options] win. A split over several devices is put into the environment: see `pipeline`.

    Raises UserError for devices that are not there or too small.
    """
    on_gpu = has_gpu()
    arguments: dict[str, Any] = {
        "model": str(config.base),
        "dtype": config.dtype,
        "max_model_len": config.max_length,
        "max_num_seqs": config.concurrency,
        "max_num_batched_tokens": max(_MIN_BATCHED_TOKENS, config.max_length),
        # Keyed by adapter and text: after a reload of all weights it would answer from the old ones.
        "enable_prefix_caching": False,
        _LOGPROBS_MODE: _PROCESSED,
        # No sampling defaults from generation_config.json: requests have their own.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if not on_gpu:
        # By default vLLM takes a share of the whole machine's memory.
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": _KV_CACHE_BYTES}
    if config.kind is WeightKind.LORA:
        arguments |= {"enable_lora": True, "max_loras": _MAX_ADAPTERS, "max_cpu_loras": _MAX_ADAPTERS, "max_lora_rank": max_rank(config)}
    if config.devices:
        split = plan_split(config.base, config.dtype, config.devices)
        arguments |= stage_arguments(split, config.options)
        set_stages(split, num_gpus=num_gpus())
    return arguments | {name: value for name, value in config.options.items() if name != IN_PROCESS}


def sampling_params(n: int, sampling: Sampling) -> Any:
    """vLLM's SamplingParams for a group: every sampling field, the sampled token's log-probability, one output at the end.

    At temperature 0 all members of a group are the same, and vLLM takes only n = 1.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1 if sampling.temperature == 0 else n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        max_tokens=sampling.max_new_tokens,
        # The sampled token's own, and no other.
        logprobs=0,
        flat_logprobs=True,
        # Only stop texts need vLLM's own detokenizer; ours decodes a group at once.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generations_of(
    output: Any, n: int, sampling: Sampling, ref: SnapshotRef, decode: Decode, capabilities: EngineCapabilities
) -> list[Generation]:
    """A finished RequestOutput as `n` generations under `ref`."""
    source = capabilities.source_at(sampling.temperature)
    rows = [list(completion.token_ids) for completion in output.outputs]
    # Where vLLM looked for stop texts it has made the text itself, and cut it.
    texts = [completion.text for completion in output.outputs] if sampling.stop else decode(rows)
    found = []
    for completion, tokens, text in zip(output.outputs, rows, texts, strict=True):
        length = len(tokens)
        logprobs = completion.logprobs.logprobs[:length] if completion.logprobs is not None else []
        found.append(
            Generation(
                token_ids=np.array(tokens, np.int32),
                logprobs=np.array(logprobs, np.float32) if source is LogprobSource.SAMPLER else np.zeros(length, np.float32),
                version_spans=(VersionSpan(start=0, end=length, version=ref.version),) if length else (),
                weights_sha256=ref.sha256,
                finish_reason=_FINISHED.get(completion.finish_reason, FinishReason.ABORT),
                text=text,
                logprob_source=source,
                logprob_distribution=capabilities.distribution,
            )
        )
    return found * n if sampling.temperature == 0 else found


def batch_decoder(base: Path) -> Decode:
    """The base's tokenizer as a function from rows of token ids to texts without special tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base, local_files_only=True)

    def decode(rows: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts

    return decode
