"""One contract, every engine: the scripted one here, those with a model in processes of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import WeightKind

_FOLDER = Path(__file__).parent
_PROCESS_S = 170.0


def _contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_contract", _FOLDER / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_scripted_engine_keeps_the_contract(tmp_path: Path) -> None:
    contract = _contract()
    versions = tuple(
        Snapshot(ref=SnapshotRef(version=number, sha256=f"sha-{number}"), kind=WeightKind.LORA, folder=tmp_path) for number in range(4)
    )

    async def run() -> None:
        engine = ScriptedEngine(reject=frozenset({3}))
        await engine.start()
        case = contract.Case(engine, versions[:3], versions[3:], None, engine.capabilities.max_tokens)
        for behaviour in contract.BEHAVIOURS:
            await asyncio.wait_for(behaviour(case), timeout=10)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    ["transformers lora", "transformers full", "vllm lora", "vllm full", "vllm lora async"],
    ids=lambda arguments: arguments.replace(" ", "-"),
)
def test_engine_with_a_model_keeps_the_contract(arguments: str) -> None:
    if arguments.startswith("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(_FOLDER / "engine_process.py"), *arguments.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PROCESS_S, check=False)
    told = done.stdout[-6_000:] + done.stderr[-3_000:]
    assert done.returncode == 0, told
    ok = [line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert ok == [behaviour.__name__ for behaviour in _contract().BEHAVIOURS], told
