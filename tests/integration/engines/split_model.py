"""A job: one model over two processes with unequal ranges of layers, beside the same model in one; then one of the two is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo_rollout.engines.engine import EngineConfig, EngineError, Generation, Snapshot
from echo_rollout.engines.vllm_inprocess import VllmInProcess
from echo_schemas.records import Sampling, WeightKind
from tests.contract.engines import snapshots
from tests.contract.engines.engine_jobs import SPLIT_LAYERS, UNEQUAL

PROMPT = (5, 9, 12, 7)
SAMPLING = Sampling(max_new_tokens=16, seed=7)
LONG = Sampling(max_new_tokens=48)
_DIES_S = 60.0


def split_model() -> dict[str, Any]:
    """`layers` of each stage; how far log-probabilities are from one process and from transformers; what a killed stage's worker says."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> dict[str, Any]:
    base = snapshots.make_base(folder / "base", layers=SPLIT_LAYERS)
    versions = [snapshots.make_snapshot(folder / f"v{number}", base, WeightKind.LORA, number) for number in range(2)]
    config = EngineConfig(
        base=base, kind=WeightKind.LORA, dtype="float32", max_length=64, lora_rank=snapshots.RANK, concurrency=32, options={}
    )  # fmt: skip
    whole = await _under_each_version(VllmInProcess(config), versions)
    await whole[0].close()
    split = await _under_each_version(VllmInProcess(replace(config, devices=UNEQUAL)), versions)
    engine = split[0]
    layers = await engine.on_thread(lambda vllm, _: vllm.collective_rpc("echo_prepare_stage"))
    from_one = from_plain = 0.0
    same_tokens = True
    for snapshot, alone, apart in zip(versions, whole[1], split[1], strict=True):
        for mine, other in zip(apart, alone, strict=True):
            same_tokens &= mine.token_ids.tolist() == other.token_ids.tolist()
            from_one = max(from_one, *(abs(mine.logprobs - other.logprobs).tolist() if same_tokens else [9.0]))
            plain = snapshots.expected_logprobs(base, snapshot, PROMPT, mine.token_ids.tolist(), SAMPLING)
            from_plain = max(from_plain, *(abs(found - wanted) for found, wanted in zip(mine.logprobs, plain, strict=True)))
    return {
        "layers": layers,
        "same_tokens": same_tokens,
        "from_one_process": float(from_one),
        "from_transformers": float(from_plain),
        "mixed": [span.version for each in split[2] for span in each.version_spans],
        "said": await _kill_a_stage(engine),
    }


async def _under_each_version(
    engine: VllmInProcess, versions: list[Snapshot]
) -> tuple[VllmInProcess, list[list[Generation]], list[Generation]]:
    """The engine, started; a group under each version; and one that ran while the second version arrived."""
    await engine.start()
    groups: list[list[Generation]] = []
    await engine.install(versions[0])
    groups.append(await engine.generate(PROMPT, 4, SAMPLING))
    running = asyncio.ensure_future(engine.generate(PROMPT, 4, LONG))
    await asyncio.sleep(0)
    await engine.install(versions[1])
    groups.append(await engine.generate(PROMPT, 4, SAMPLING))
    return engine, groups, await running


async def _kill_a_stage(engine: VllmInProcess) -> list[str]:
    """What generations say: one that runs when the last stage is killed, and one that starts afterwards."""
    pid = await engine.on_thread(lambda vllm, _: vllm.engine_core.engine_core.model_executor.workers[-1].proc.pid)
    running = [asyncio.ensure_future(engine.generate(PROMPT, 32, LONG)) for _ in range(4)]
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    said = []
    for each in (*running[:1], engine.generate(PROMPT, 1, SAMPLING)):
        try:
            await asyncio.wait_for(each, _DIES_S)
            said.append("an answer")
        except EngineError as exc:
            said.append(exc.message)
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    return said
