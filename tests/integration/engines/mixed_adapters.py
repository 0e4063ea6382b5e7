"""A job: one vLLM batch of two adapters and none, checked row by row against transformers and PEFT."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from echo_rollout.engines.engine import EngineConfig, Snapshot
from echo_rollout.engines.vllm_arguments import sampling_params
from echo_rollout.engines.vllm_inprocess import VllmInProcess
from echo_schemas.records import Sampling, WeightKind
from tests.contract.engines import snapshots

PROMPTS: tuple[tuple[int, ...], ...] = ((5, 9, 12, 7), (3, 3, 8), (20, 11, 6, 2, 30))
SAMPLING = Sampling(max_new_tokens=16)
_ROUNDS = 2


def watch_batches() -> list[int]:
    """How many adapters each call of the replaced functions saw, from now on."""
    from echo_rollout.engines import lora_cpu

    seen: list[int] = []
    split = lora_cpu._groups

    def watched(indices: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        groups = list(split(indices))
        seen.append(len(groups))
        yield from groups

    lora_cpu._groups = watched
    return seen


Row = tuple[str, tuple[int, ...], list[int], list[float]]


def generate(vllm: Any, chosen: dict[str, Snapshot | None]) -> list[Row]:
    """Adapter, prompt, tokens and log-probabilities of every row of one mixed batch."""
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    requests = {
        name: None if snapshot is None else LoRARequest(name, number, str(snapshot.folder))
        for number, (name, snapshot) in enumerate(chosen.items(), start=1)
    }
    asked: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number in range(_ROUNDS):
        # Interleaved, so that neighbours in the batch have different adapters.
        for prompt in PROMPTS:
            for name, request in requests.items():
                key = f"{name}-{number}-{prompt}"
                asked[key] = name, prompt
                vllm.add_request(key, TokensPrompt(prompt_token_ids=list(prompt)), sampling_params(2, SAMPLING), lora_request=request)
    rows: list[Row] = []
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            if output.finished:
                name, prompt = asked[output.request_id]
                for each in output.outputs:
                    tokens = list(each.token_ids)
                    rows.append((name, prompt, tokens, list(each.logprobs.logprobs[: len(tokens)])))
    return rows


def mix_adapters(*, stock: bool) -> dict[str, Any]:
    """The largest difference of a log-probability for each adapter, how many rows there were, and how many adapters one call of the
    replaced functions saw together. `stock`: with vLLM's own functions.
    """
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), stock=stock))


async def _measure(folder: Path, *, stock: bool) -> dict[str, Any]:
    base = snapshots.make_base(folder / "base")
    chosen: dict[str, Snapshot | None] = {
        "first": snapshots.make_snapshot(folder / "v1", base, WeightKind.LORA, 1),
        "none": None,
        "second": snapshots.make_snapshot(folder / "v2", base, WeightKind.LORA, 2, rank=4),
    }
    # Every slot is taken: vLLM's own functions take the last one for rows without an adapter, whose index is -1.
    options: dict[str, object] = {"max_loras": 2, "max_cpu_loras": 2}
    if stock:
        options["worker_extension_cls"] = ""
    config = EngineConfig(
        base=base, kind=WeightKind.LORA, dtype="float32", max_length=64, lora_rank=8, concurrency=64, options=options
    )  # fmt: skip
    engine = VllmInProcess(config)
    await engine.start()
    seen = [] if stock else watch_batches()
    rows = await engine.on_thread(lambda vllm, _: generate(vllm, chosen))
    await engine.close()
    differences = dict.fromkeys(chosen, 0.0)
    for name, prompt, tokens, logprobs in rows:
        expected = snapshots.expected_logprobs(base, chosen[name], prompt, tokens, SAMPLING)
        largest = max(abs(found - wanted) for found, wanted in zip(logprobs, expected, strict=True))
        differences[name] = max(differences[name], largest)
    return {"differences": differences, "rows": len(rows), "adapters_in_a_call": max(seen, default=0)}
