"""The engine that tests of everything else rely on does what its script says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo_rollout.engines.engine import EngineError, Snapshot, SnapshotRef, SnapshotRejected
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import FinishReason, Sampling, WeightKind

SAMPLING = Sampling(max_new_tokens=3)


def snapshot(version: int) -> Snapshot:
    return Snapshot(ref=SnapshotRef(version=version, sha256=f"sha {version}"), kind=WeightKind.LORA, folder=Path("nowhere"))


async def started(engine: ScriptedEngine) -> ScriptedEngine:
    await engine.start()
    await engine.install(snapshot(0))
    return engine


def test_answers_follow_from_prompt_version_and_index() -> None:
    async def run() -> None:
        engine = await started(ScriptedEngine())
        first = await engine.generate((5, 9), 2, SAMPLING)
        assert [generation.token_ids.tolist() for generation in first] == [[6] * 3, [7] * 3]
        assert first[0].weights_sha256 == "sha 0"
        await engine.install(snapshot(1))
        assert [generation.token_ids.tolist() for generation in await engine.generate((5, 9), 1, SAMPLING)] == [[7] * 3]

    asyncio.run(run())


def test_a_script_of_one_s_own_may_be_cut_or_empty() -> None:
    async def run() -> None:
        engine = await started(ScriptedEngine(answer=lambda prompt, version, index: [] if index else [3, 4, 5, 6]))
        cut, empty = await engine.generate((5,), 2, SAMPLING)
        assert (cut.token_ids.tolist(), cut.finish_reason) == ([3, 4, 5], FinishReason.LENGTH)
        assert (empty.token_ids.size, empty.version_spans, empty.finish_reason) == (0, (), FinishReason.STOP)

    asyncio.run(run())


def test_a_version_that_the_script_refuses_leaves_the_old_one() -> None:
    async def run() -> None:
        engine = await started(ScriptedEngine(reject=frozenset({1})))
        with pytest.raises(SnapshotRejected, match="refuses version 1"):
            await engine.install(snapshot(1))
        assert engine.installed == snapshot(0).ref

    asyncio.run(run())


def test_generations_that_are_held_go_on_one_by_one_under_their_version() -> None:
    async def run() -> None:
        engine = await started(ScriptedEngine())
        engine.hold = True
        waiting = [asyncio.ensure_future(engine.generate((5,), 1, SAMPLING)) for _ in range(2)]
        await asyncio.sleep(0)
        await engine.install(snapshot(1))
        assert engine.in_use == {0, 1}
        await engine.release()
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (first,) = done
        assert first.result()[0].weights_sha256 == "sha 0"
        await engine.close()
        (other,) = set(waiting) - done
        with pytest.raises(EngineError, match="closed"):
            await other
        assert engine.in_use == {1}

    asyncio.run(run())
