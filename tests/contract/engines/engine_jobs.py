"""Jobs: all behaviours of the contract against one engine with a model. Imports transformers; `vllm_jobs` imports vLLM too.

vLLM replaces torch's thread settings and warns a lot while it is imported; neither may reach other tests.
"""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

from echo_rollout.engines.catalogue import open_engine
from echo_rollout.engines.engine import EngineConfig, Snapshot
from echo_schemas.records import Sampling, WeightKind
from tests.contract.engines import contract, snapshots

_MAX_LENGTH = 64
_OPTIONS: dict[str, dict[str, object]] = {"async": {"in_process": False}, "completions": {"enable_scale_out": False}}
"""What makes the engine take its other way: `vllm` processes of its own, `openai` the route that every server has."""


async def _run(name: str, kind: WeightKind, options: dict[str, object], folder: Path) -> dict[str, str]:
    base = snapshots.make_base(folder / "base", tied=kind is WeightKind.FULL)
    versions = tuple(snapshots.make_snapshot(folder / f"v{number}", base, kind, number) for number in range(3))
    refused = [snapshots.broken(versions[0], folder / "broken")]
    if kind is WeightKind.LORA:
        refused.append(snapshots.make_snapshot(folder / "rank", base, kind, 8, rank=2 * snapshots.RANK))
    other = WeightKind.FULL if kind is WeightKind.LORA else WeightKind.LORA
    refused.append(replace(versions[1], kind=other))
    config = EngineConfig(
        base=base, kind=kind, dtype="float32", max_length=_MAX_LENGTH, lora_rank=snapshots.RANK, concurrency=64, options=options
    )
    engine = open_engine(name, config)
    await engine.start()
    expected = partial(_expected, base)
    case = contract.Case(engine, versions, tuple(refused), expected, _MAX_LENGTH, base)
    found = {}
    for behaviour in contract.BEHAVIOURS:
        try:
            await asyncio.wait_for(behaviour(case), timeout=300)
            found[behaviour.__name__] = ""
        except Exception:  # the next behaviour is tried too, and the test shows which failed
            found[behaviour.__name__] = traceback.format_exc()
    await engine.close()
    return found


def _expected(base: Path, snapshot: Snapshot, tokens: list[int], sampling: Sampling) -> list[float]:
    return snapshots.expected_logprobs(base, snapshot, contract.PROMPT, tokens, sampling)


def keep_contract(name: str, kind: str, way: str = "") -> dict[str, str]:
    """By behaviour: empty where the engine is as it must be, else the traceback. `way`: one of the engine's other ways."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(name, WeightKind(kind), dict(_OPTIONS.get(way, {})), Path(folder)))
