"""Answers under exactly one version beside the newest: detours, what waits for them, and what never sees them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_bus.clock import ManualClock
from echo_bus.errors import OffsetLost
from echo_rollout.engines.engine import EngineError, Generation, Snapshot, SnapshotRef, SnapshotRejected, Switch
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.older_snapshots import OlderSnapshots, VersionNotKept
from echo_schemas.records import Sampling, WeightFile, WeightKind, WeightManifest

SAMPLING = Sampling(max_new_tokens=4)
PROMPT = [1, 2, 3]


def snapshot(version: int) -> Snapshot:
    sha256 = hashlib.sha256(str(version).encode()).hexdigest()
    return Snapshot(ref=SnapshotRef(version=version, sha256=sha256), kind=WeightKind.LORA, folder=Path(f"/nowhere/v{version}"))


class Engine(ScriptedEngine):
    """Notes its installs. `switch` as asked."""

    def __init__(self, switch: Switch = Switch.KEEPS, **script: Any) -> None:
        super().__init__(**script)
        self.capabilities = replace(self.capabilities, switch=switch)
        self.installs: list[int] = []
        self.refuse_again: set[int] = set()

    async def install(self, snapshot: Snapshot) -> None:
        if snapshot.ref.version in self.refuse_again and snapshot.ref.version in self.installs:
            raise SnapshotRejected("The files are gone.")
        await super().install(snapshot)
        self.installs.append(snapshot.ref.version)


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def versions_of(generations: Sequence[Generation]) -> set[int]:
    return {span.version for generation in generations for span in generation.version_spans}


def played(play: Callable[[Engine, ExactVersions, ManualClock], Awaitable[None]], **options: Any) -> Engine:
    """Run `play` with version 7 installed."""
    engine, clock = Engine(**options), ManualClock()
    versions = ExactVersions(engine, clock)

    async def run() -> None:
        await versions.start()
        await versions.install(snapshot(7))
        await play(engine, versions, clock)
        await versions.close()

    asyncio.run(run())
    return engine


@pytest.mark.parametrize("switch", list(Switch))
def test_an_older_version_answers_and_the_newest_comes_back(switch: Switch) -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        async with versions.under(3, snapshot(3)) as is_exact:
            assert is_exact
            assert versions.installed == snapshot(7).ref, "nobody outside sees the detour"
            assert {3, 7} <= versions.in_use
            training = asyncio.create_task(versions.generate(PROMPT, 1, SAMPLING))
            assert versions_of(await engine.generate(PROMPT, 2, SAMPLING)) == {3}
            await settle()
            assert not training.done(), "what is trained waits for the newest"
        assert versions_of(await training) == {7}

    assert played(play, switch=switch).installs == [7, 3, 7]


def test_the_newest_version_needs_no_detour_and_holds_back_the_next() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        assert not versions.needs(7)
        async with versions.under(7, None) as is_exact:
            assert is_exact
            newer = asyncio.create_task(versions.install(snapshot(8)))
            assert versions_of(await versions.generate(PROMPT, 1, SAMPLING)) == {7}, "training goes on"
            await settle()
            assert not newer.done()
            assert versions_of(await engine.generate(PROMPT, 1, SAMPLING)) == {7}, "a second turn is of the same version"
        await newer
        async with versions.under(7, None) as is_exact:
            assert not is_exact, "it is not the newest any more, and its files are needed"

    assert played(play).installs == [7, 8]


def test_groups_of_one_version_share_a_detour_and_others_take_turns() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        order: list[int] = []

        async def group(version: int, leave: asyncio.Event) -> None:
            async with versions.under(version, snapshot(version)):
                assert versions_of(await engine.generate(PROMPT, 1, SAMPLING)) == {version}
                await leave.wait()
                order.append(version)

        leave = asyncio.Event()
        tasks = [asyncio.create_task(group(version, leave)) for version in (3, 4, 3, 3)]
        await settle()
        assert engine.installs == [7, 3]
        leave.set()
        await asyncio.gather(*tasks)
        assert order == [3, 3, 3, 4]

    assert played(play).installs == [7, 3, 7, 4, 7]


def test_nobody_joins_a_session_that_an_install_waits_for() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        async with versions.under(3, snapshot(3)):
            newer = asyncio.create_task(versions.install(snapshot(8)))
            await settle()
            late = asyncio.create_task(enter(versions, 3))
            await settle()
            assert not late.done()
        await newer
        await late

    assert played(play).installs == [7, 3, 7, 8, 3, 8]


def test_a_long_detour_lets_training_through_before_the_next() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        async with versions.under(3, snapshot(3)):
            training = asyncio.create_task(versions.generate(PROMPT, 1, SAMPLING))
            await enter(versions, 3)
            clock.advance(60)
            late = asyncio.create_task(enter(versions, 3))
            await settle()
            assert not late.done()
        assert versions_of(await training) == {7}
        await late

    assert played(play).installs == [7, 3, 7, 3, 7]


async def enter(versions: ExactVersions, version: int) -> None:
    async with versions.under(version, snapshot(version)) as is_exact:
        assert is_exact


@pytest.mark.parametrize(("switch", "waits"), [(Switch.KEEPS, False), (Switch.DRAINS, True), (Switch.MIXES, True)])
def test_only_an_engine_that_keeps_versions_apart_goes_on_with_what_it_has(switch: Switch, waits: bool) -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        engine.hold = True
        under_way = asyncio.create_task(versions.generate(PROMPT, 1, SAMPLING))
        await settle()
        detour = asyncio.create_task(enter(versions, 3))
        await settle()
        assert detour.done() is not waits
        await engine.release()
        assert versions_of(await under_way) == {7}
        await detour

    assert played(play, switch=switch).installs == [7, 3, 7]


def test_a_version_that_the_engine_refuses_leaves_the_newest_in_force() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        with pytest.raises(SnapshotRejected):
            await enter(versions, 3)
        assert versions_of(await versions.generate(PROMPT, 1, SAMPLING)) == {7}

    assert played(play, reject=frozenset({3})).installs == [7]


def test_a_newest_version_that_does_not_come_back_is_an_error_and_no_secret() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        engine.refuse_again = {7}
        with pytest.raises(EngineError, match="Version 7 could not be brought back"):
            await enter(versions, 3)

    played(play)


def test_a_group_that_is_cancelled_in_a_detour_gives_the_engine_back() -> None:
    async def play(engine: Engine, versions: ExactVersions, clock: ManualClock) -> None:
        engine.hold = True

        async def group() -> None:
            async with versions.under(3, snapshot(3)):
                await engine.generate(PROMPT, 1, SAMPLING)

        task = asyncio.create_task(group())
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.hold = False
        assert versions_of(await versions.generate(PROMPT, 1, SAMPLING)) == {7}

    assert played(play).installs == [7, 3, 7]


class Source:
    """Writes a file for each fetch, or raises."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.error: Exception | None = None

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        if self.error is not None:
            raise self.error
        self.fetched.append(manifest.version)
        folder.mkdir()


def manifest(version: int) -> WeightManifest:
    sha256 = snapshot(version).ref.sha256
    files = (WeightFile(name="adapter_model.safetensors", num_bytes=1, sha256=sha256),)
    return WeightManifest(
        run_id="demo",
        version=version,
        kind=WeightKind.LORA,
        files=files,
        num_bytes=1,
        sha256=sha256,
        uri="file:///nowhere",
        session="s",
        checkpoint="c",
        next_seq=0,
        created_ms=0,
    )


def test_an_older_snapshot_is_fetched_once_and_let_go_when_others_were_asked_for(tmp_path: Path) -> None:
    source = Source()
    in_use: set[int] = {1}

    async def play() -> None:
        older = OlderSnapshots(source, tmp_path, manifest_of=manifest, in_use=lambda: frozenset(in_use))
        first, second = await asyncio.gather(older.fetch(1), older.fetch(1))
        assert first == second
        assert first.folder.is_dir()
        older.release(1)
        older.release(1)
        for version in (2, 3, 4):
            await older.fetch(version)
            older.release(version)
        assert first.folder.is_dir(), "the engine still has it"
        in_use.clear()
        await older.fetch(5)
        older.release(5)
        older.close()

    asyncio.run(play())
    assert source.fetched == [1, 2, 3, 4, 5]


def test_a_version_whose_bytes_are_gone_is_not_kept_and_may_be_asked_for_again(tmp_path: Path) -> None:
    source = Source()

    async def play() -> None:
        known = {2: manifest(2)}
        older = OlderSnapshots(source, tmp_path, manifest_of=known.get, in_use=lambda: frozenset())
        with pytest.raises(VersionNotKept, match="no manifest of version 1"):
            await older.fetch(1)
        source.error = OffsetLost("The chunks are past their retention.")
        with pytest.raises(VersionNotKept, match="past their retention"):
            await older.fetch(2)
        source.error = None
        assert (await older.fetch(2)).ref == snapshot(2).ref
        older.close()

    asyncio.run(play())
