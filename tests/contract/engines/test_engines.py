"""One contract, every engine: the scripted one here, those with a model in processes of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import WeightKind
from tests.contract.engines import contract

_ROOT = Path(__file__).parents[3]
# Engines with processes of their own import vLLM three times, one after another.
_PROCESS_S = 900.0


def test_scripted_engine_keeps_the_contract(tmp_path: Path) -> None:
    versions = tuple(
        Snapshot(ref=SnapshotRef(version=number, sha256=f"sha-{number}"), kind=WeightKind.LORA, folder=tmp_path) for number in range(4)
    )

    async def run() -> None:
        engine = ScriptedEngine(reject=frozenset({3}))
        await engine.start()
        case = contract.Case(engine, versions[:3], versions[3:], None, engine.capabilities.max_tokens)
        for behaviour in contract.BEHAVIOURS:
            await asyncio.wait_for(behaviour(case), timeout=60)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(_PROCESS_S + 20)
@pytest.mark.parametrize(
    "arguments",
    [
        "transformers lora",
        "transformers full",
        "vllm lora",
        "vllm full",
        "vllm lora async",
        "openai lora",
        "openai full",
        "openai lora completions",
    ],
    ids=lambda arguments: arguments.replace(" ", "-"),
)
def test_engine_with_a_model_keeps_the_contract(arguments: str) -> None:
    if not arguments.startswith("transformers") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "tests.contract.engines.engine_process", *arguments.split()]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_PROCESS_S, check=False)
    told = done.stdout[-6_000:] + done.stderr[-3_000:]
    assert done.returncode == 0, told
    ok = [line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert ok == [behaviour.__name__ for behaviour in contract.BEHAVIOURS], told
