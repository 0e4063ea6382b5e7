"""Jobs: all behaviours of the contract against one engine with a model. Imports transformers; `vllm_jobs` imports vLLM too.

vLLM replaces torch's thread settings and warns a lot while it is imported; neither may reach other tests.
"""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from echo_core.layer_split import Device
from echo_rollout.engines.catalogue import open_engine
from echo_rollout.engines.engine import EngineConfig, Snapshot
from echo_rollout.engines.openai_engine import OpenAIEngine
from echo_schemas.records import Sampling, WeightKind
from tests.contract.engines import contract, snapshots
from tests.contract.engines.behind_cluster import started_cluster_engine
from tests.contract.engines.cluster_behaviours import BEHAVIOURS as CLUSTER_BEHAVIOURS

_MAX_LENGTH = 64
_OPTIONS: dict[str, dict[str, object]] = {"async": {"in_process": False}, "completions": {"enable_scale_out": False}}
"""What makes the engine take its other way: `vllm` processes of its own, `openai` the route that every server has."""
_SPLIT = "pipeline"
"""The way of `vllm` over two unequal devices."""
SPLIT_LAYERS = 3
UNEQUAL = (Device(memory_gb=0.0004, tflops=1.0), Device(memory_gb=0.0006, tflops=2.0))
"""The first has room for one layer of `snapshots.make_base`, the second for two."""


async def _run(name: str, kind: WeightKind, way: str, folder: Path) -> dict[str, str]:
    base = snapshots.make_base(folder / "base", tied=kind is WeightKind.FULL, layers=SPLIT_LAYERS if way == _SPLIT else 2)
    versions = tuple(snapshots.make_snapshot(folder / f"v{number}", base, kind, number) for number in range(3))
    refused = [snapshots.broken(versions[0], folder / "broken")]
    if kind is WeightKind.LORA:
        refused.append(snapshots.make_snapshot(folder / "rank", base, kind, 8, rank=2 * snapshots.RANK))
    other = WeightKind.FULL if kind is WeightKind.LORA else WeightKind.LORA
    refused.append(replace(versions[1], kind=other))
    config = EngineConfig(
        base=base, kind=kind, dtype="float32", max_length=_MAX_LENGTH, lora_rank=snapshots.RANK, concurrency=64,
        options=dict(_OPTIONS.get(way, {})), devices=UNEQUAL if way == _SPLIT else (),
    )  # fmt: skip
    engine = open_engine(name, config)
    await engine.start()
    expected = partial(_expected, base)
    case = contract.Case(engine, versions, tuple(refused), expected, _MAX_LENGTH, base)
    found = {}
    if isinstance(engine, OpenAIEngine) and kind is WeightKind.LORA and not way:
        assert engine._server is not None, "it was opened without a url"
        # Before its own contract, whose last behaviour ends the server.
        async with started_cluster_engine(engine._server, config, versions[0], folder / "node") as clustered:
            found = await _try_all(CLUSTER_BEHAVIOURS, replace(case, engine=clustered), "parallax ")
    found |= await _try_all(contract.BEHAVIOURS, case)
    await engine.close()
    return found


async def _try_all(behaviours: Sequence[contract.Behaviour], case: contract.Case, prefix: str = "") -> dict[str, str]:
    found = {}
    for behaviour in behaviours:
        try:
            await asyncio.wait_for(behaviour(case), timeout=300)
            found[prefix + behaviour.__name__] = ""
        except Exception:  # the next behaviour is tried too, and the test shows which failed
            found[prefix + behaviour.__name__] = traceback.format_exc()
    return found


def _expected(base: Path, snapshot: Snapshot, tokens: list[int], sampling: Sampling) -> list[float]:
    return snapshots.expected_logprobs(base, snapshot, contract.PROMPT, tokens, sampling)


def keep_contract(name: str, kind: str, way: str = "") -> dict[str, str]:
    """By behaviour: empty where the engine is as it must be, else the traceback. `way`: one of the engine's other ways."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(name, WeightKind(kind), way, Path(folder)))
