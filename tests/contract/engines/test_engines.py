"""One contract, every engine: the scripted one here, those with a model in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import WeightKind
from tests.contract.engines import contract
from tests.contract.engines.cluster_behaviours import BEHAVIOURS as CLUSTER_BEHAVIOURS
from tests.forks.process import ForkingProcess
from tests.installed import missing
from tests.thorough import only_thorough


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
@pytest.mark.timeout(1_000)
@pytest.mark.parametrize(
    "engine",
    [
        "transformers lora",
        "transformers full",
        "vllm lora",
        "vllm full",
        "openai lora",
        # The same engines by another way, each after a minute of starting processes.
        *(pytest.param(engine, marks=only_thorough) for engine in ("vllm lora async", "openai full", "openai lora completions")),
        *(pytest.param(engine, marks=only_thorough) for engine in ("vllm lora pipeline", "vllm full pipeline")),
    ],
    ids=lambda engine: engine.replace(" ", "-"),
)
def test_engine_with_a_model_keeps_the_contract(engine: str, request: pytest.FixtureRequest) -> None:
    name, kind, *way = engine.split()
    process: ForkingProcess = request.getfixturevalue("transformers_process" if name == "transformers" else "vllm_process")
    found = process.run("keep_contract", name=name, kind=kind, way="".join(way))
    wanted = {behaviour.__name__ for behaviour in contract.BEHAVIOURS}
    if engine == "openai lora":
        # Its server computes for a cluster too.
        wanted |= {f"parallax {behaviour.__name__}" for behaviour in CLUSTER_BEHAVIOURS}
    assert set(found) == wanted
    broken = {behaviour: told for behaviour, told in found.items() if told}
    assert not broken, "\n".join(broken.values())


@pytest.fixture(scope="module")
def transformers_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingProcess]:
    """Where engines on transformers run."""
    if absent := missing("torch", "transformers", "peft"):
        pytest.skip(f"{', '.join(absent)} is not installed: install the extra 'learner'")
    with closing(ForkingProcess("tests.contract.engines.engine_jobs", tmp_path_factory.mktemp("transformers"))) as process:
        yield process
