"""What the worker's engine costs over vLLM driven bare: tokens per second of both, in turn, in one process, with the same requests.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=0 python bench/rollout.py --json rollout.json

Bare: `add_request` for all, then `step` until nothing is left; nothing is made of the outputs. Engine: the same requests through
`Engine.generate` on an asyncio loop, with tokens, log-probabilities, version and text of every generation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from echo_rollout.engines.engine import EngineConfig, Snapshot, SnapshotRef
from echo_rollout.engines.vllm_arguments import engine_arguments, sampling_params
from echo_rollout.engines.vllm_inprocess import VllmInProcess, prefetch
from echo_schemas.records import Sampling, WeightKind
from echo_tasks.base_models import resolve_base

_GROUP, _GROUPS, _RANK, _MAX_LENGTH, _CONCURRENCY = 16, 64, 32, 64, 512
_SAMPLING = Sampling(max_new_tokens=8)


def _write_adapter(base: Path, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(folder))


def _prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[*(draw.randrange(2, 12) for _ in range(6)), 12] for _ in range(_GROUPS)]


def _bare(vllm: Any, request: Any, prompts: list[list[int]], names: Any) -> float:
    """Tokens per second."""
    from vllm.inputs import TokensPrompt

    began, num_tokens = time.perf_counter(), 0
    for prompt in prompts:
        tokens = TokensPrompt(prompt_token_ids=prompt)
        vllm.add_request(f"bare-{next(names)}", tokens, sampling_params(_GROUP, _SAMPLING), lora_request=request)
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            num_tokens += sum(len(each.token_ids) for each in output.outputs) if output.finished else 0
    return num_tokens / (time.perf_counter() - began)


async def _through_engine(engine: VllmInProcess, prompts: list[list[int]]) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    groups = await asyncio.gather(*(engine.generate(prompt, _GROUP, _SAMPLING) for prompt in prompts))
    return sum(len(each.token_ids) for group in groups for each in group) / (time.perf_counter() - began)


async def measure(rounds: int) -> dict[str, float]:
    """Medians over `rounds` pairs, and the median of the pairs' ratios."""
    began = time.perf_counter()
    prefetch()
    imported = time.perf_counter()
    base = resolve_base("demo:tiny-qwen3")
    config = EngineConfig(
        base=base, kind=WeightKind.LORA, dtype="float32", max_length=_MAX_LENGTH, lora_rank=_RANK, concurrency=_CONCURRENCY, options={}
    )
    engine = VllmInProcess(config)
    starting = time.perf_counter()
    await engine.start()
    started = time.perf_counter()
    bare, facade, names = [], [], itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        _write_adapter(base, Path(folder))
        await engine.install(Snapshot(ref=SnapshotRef(version=0, sha256=""), kind=WeightKind.LORA, folder=Path(folder)))
        first = time.perf_counter()
        await engine.generate(_prompts(0)[0], _GROUP, _SAMPLING)
        first_s = time.perf_counter() - first
        for number in range(-1, rounds):
            prompts = _prompts(number + 1)
            one = await engine.on_thread(lambda vllm, request, prompts=prompts: _bare(vllm, request, prompts, names))  # type: ignore[misc]
            other = await _through_engine(engine, prompts)
            if number >= 0:
                bare.append(one)
                facade.append(other)
        await engine.close()
    return {
        "engine_tokens_per_s": statistics.median(facade),
        "bare_tokens_per_s": statistics.median(bare),
        "ratio": statistics.median(b / a for a, b in zip(bare, facade, strict=True)),
        "import_s": imported - began,
        "start_s": started - starting,
        "first_generation_s": first_s,
        "max_num_seqs": float(engine_arguments(config)["max_num_seqs"]),
    }


def main() -> int:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(asyncio.run(measure(arguments.rounds)), indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
