"""The engine that tests of everything else rely on does what its script says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo_rollout.engines.engine import EngineConfig, EngineError, Snapshot, SnapshotRef, SnapshotRejected
from echo_rollout.engines.scripted import PacedEngine, ScriptedEngine
from echo_schemas.errors import UserError
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


def paced(**options: object) -> PacedEngine:
    return PacedEngine(
        EngineConfig(
            base=Path("nowhere"), kind=WeightKind.LORA, dtype="float32", max_length=64, lora_rank=1, concurrency=1, options=dict(options)
        )
    )


@pytest.mark.parametrize(("slots", "least_s"), [(1, 0.06), (2, 0.04), (3, 0.02)])
def test_a_paced_engine_is_no_faster_than_it_is_told_to_be_and_answers_as_the_script_does(slots: int, least_s: float) -> None:
    async def run() -> None:
        engine = await started(paced(seconds=0.02, slots=slots))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        groups = await asyncio.gather(*(engine.generate((5, 9), 2, SAMPLING) for _ in range(3)))
        # The loop's clock may be a tick early.
        assert loop.time() - began_s >= least_s - 0.005
        assert [[generation.token_ids.tolist() for generation in group] for group in groups] == [[[6] * 3, [7] * 3]] * 3

    asyncio.run(run())


def test_a_paced_engine_ends_a_group_under_the_version_that_it_began_with_and_none_after_its_end() -> None:
    async def run() -> None:
        engine = await started(paced(seconds=0.02, slots=1))
        group = asyncio.create_task(engine.generate((5, 9), 1, SAMPLING))
        # It has its slot at once, and sleeps.
        await asyncio.sleep(0)
        await engine.install(snapshot(1))
        assert engine.in_use == {0, 1}
        assert [generation.version_spans[0].version for generation in await group] == [0]
        last = asyncio.create_task(engine.generate((5, 9), 1, SAMPLING))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await last

    asyncio.run(run())


@pytest.mark.parametrize("options", [{"seconds": -1}, {"seconds": "fast"}, {"slots": 0}, {"slots": 1.5}])
def test_what_is_no_speed_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="are no speed"):
        paced(**options)
