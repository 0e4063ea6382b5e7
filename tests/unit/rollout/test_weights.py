"""What arrives as weights and what does not: whatever is wrong with a snapshot, the old one stays in force and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from prometheus_client import CollectorRegistry

from echo_bus.blobs import cursor as blob_cursor
from echo_bus.blobs.files import partial_of
from echo_bus.bus import Bus
from echo_bus.clock import ManualClock, SystemClock
from echo_bus.errors import BlobCorrupt, ClusterUnreachable, DeadlineExceeded, OffsetLost
from echo_bus.reading.view import CompactedView
from echo_memory import MemoryCluster
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.watcher import InstallOutcome, WeightWatcher
from echo_runtime.notices import STANDSTILL_S, Notices
from echo_runtime.places import PlaceTimes
from echo_schemas.records import BlobRef, WeightFile, WeightKind, WeightManifest, WorkerState
from echo_schemas.topics import WEIGHT_CHUNKS
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import WAIT_S, Swarm, wait_until

WRONG = "0" * 64


def another_chunk_sum(ref: BlobRef) -> BlobRef:
    return replace(ref, chunks=(replace(ref.chunks[0], sha256=WRONG), *ref.chunks[1:]))


def one_chunk_more_than_there_is(ref: BlobRef) -> BlobRef:
    return replace(ref, num_chunks=ref.num_chunks + 1, last_offset=ref.last_offset + 1, chunks=())


def chunks_beyond_the_end(ref: BlobRef) -> BlobRef:
    return replace(ref, first_offset=ref.last_offset + 1, last_offset=ref.last_offset + 1)


def chunks_of_another_blob(ref: BlobRef) -> BlobRef:
    return replace(ref, blob="v/77")


def another_sum(ref: BlobRef) -> BlobRef:
    return replace(ref, sha256=WRONG)


@pytest.mark.parametrize(
    "altered", [another_chunk_sum, one_chunk_more_than_there_is, chunks_beyond_the_end, chunks_of_another_blob, another_sum]
)
def test_a_snapshot_that_is_not_in_the_log_as_promised_leaves_the_old_weights_in_force(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, altered: Callable[[BlobRef], BlobRef]
) -> None:
    monkeypatch.setattr(blob_cursor, "_MISSING_S", 0.02)
    monkeypatch.setattr("echo_rollout.weights.watcher._RETRY_LEAST_S", 0.01)
    swarm = make_swarm()
    swarm.publish_version(0)
    worker = swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="installed") == 1, "version 0")
    swarm.publish_version(1, altered=altered)
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="corrupt") >= 2, "version 1 to be refused and tried again")
    swarm.ask(swarm.request(0))
    wait_until(lambda: len(swarm.trajectories()) == 2, "a group under the old weights")
    assert {(record.min_version, record.max_version) for record in swarm.trajectories()} == {(0, 0)}
    said = swarm.statuses()[-1]
    assert (said.state, said.installed_version) == (WorkerState.READY, 0)
    assert leftovers(swarm) == {"v0"}
    swarm.publish_version(2)
    wait_until(lambda: swarm.statuses()[-1].installed_version == 2, "the next version to be acknowledged")
    assert worker.is_alive


def leftovers(swarm: Swarm) -> set[str]:
    """Versions of which the worker holds files."""
    return {path.name.partition("-")[0] for folder in swarm.folder.glob("weights-*") for path in folder.iterdir() if path.name[0] != "."}


def test_a_snapshot_that_retention_took_is_lost_and_the_next_is_installed(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    manifest = swarm.publish_version(0)
    assert manifest.blob is not None
    place = TopicPartition(swarm.bus.namespace.topic(WEIGHT_CHUNKS), manifest.blob.partition, manifest.blob.last_offset + 1)
    cluster.admin().delete_records([place])[place].result(WAIT_S)
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="lost") >= 1, "the snapshot to be called lost")
    assert all(status.installed_version is None for status in swarm.statuses())
    swarm.publish_version(1)
    wait_until(lambda: swarm.statuses()[-1].installed_version == 1, "the next version to be acknowledged")


def test_a_worker_that_joins_late_starts_under_the_newest_weights_and_fetches_no_other(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[CompactedView[Any]] = []
    open_view = Bus.view

    def noted(bus: Bus, *args: Any, **options: Any) -> CompactedView[Any]:
        views.append(open_view(bus, *args, **options))
        return views[-1]

    monkeypatch.setattr(Bus, "view", noted)
    swarm = make_swarm()
    for version in range(4):
        swarm.publish_version(version)
    swarm.ask(swarm.request(0))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: len(swarm.trajectories()) == 2, "the first group")
    assert {record.min_version for record in swarm.trajectories()} == {3}
    assert swarm.metric("echo_rollout_installs_total", outcome="installed") == 1
    assert next(status.installed_version for status in swarm.statuses() if status.installed_version is not None) == 3
    kept = [view.items() for view in views]
    assert [set(items) for items in kept if any(isinstance(item, WeightManifest) for item in items.values())] == [{"demo/current"}]


class ScriptedSource:
    """Fetches fail as `errors` says, one after another; then they succeed. `asked`: the versions in order."""

    def __init__(self, *errors: Exception) -> None:
        self.asked: list[int] = []
        self._errors = list(errors)

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        self.asked.append(manifest.version)
        if self._errors:
            raise self._errors.pop(0)
        folder.mkdir()


def manifest_of(version: int) -> WeightManifest:
    sha256 = f"{version:064x}"
    return WeightManifest(
        run_id="demo",
        version=version,
        parent=version - 1 if version else None,
        kind=WeightKind.LORA,
        files=(WeightFile(name="adapter_model.safetensors", num_bytes=1, sha256=sha256),),
        num_bytes=1,
        sha256=sha256,
        uri="memory://snapshots",
        session="s",
        checkpoint="c",
        next_seq=0,
        created_ms=0,
    )


class Watch:
    """A watcher on a loop of its own, and everything that it says."""

    def __init__(self, source: ScriptedSource, folder: Path, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.newest: WeightManifest | None = None
        self.installed: list[SnapshotRef] = []
        registry, clock = CollectorRegistry(), SystemClock()
        self.registry = registry
        self.clock = ManualClock()
        self.notices = Notices(self.clock)
        self.watcher = WeightWatcher(
            self.engine,
            source,
            newest=lambda: self.newest,
            folder=folder,
            on_installed=self.installed.append,
            places=PlaceTimes(registry, clock),
            notices=self.notices,
            metrics=WorkerMetrics(registry),
            clock=self.clock,
        )

    def outcomes(self, outcome: InstallOutcome) -> float:
        return self.registry.get_sample_value("echo_rollout_installs_total", {"outcome": outcome.value}) or 0.0

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)
        assert condition(), f"waited for {what}"

    def run(self, script: Callable[[], Awaitable[None]]) -> None:
        """Run `script` while the watcher runs."""

        async def both() -> None:
            watching = asyncio.create_task(self.watcher.run())
            try:
                await script()
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

        asyncio.run(both())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (BlobCorrupt("altered"), InstallOutcome.CORRUPT),
        (OffsetLost("gone"), InstallOutcome.LOST),
        (ClusterUnreachable("nobody answers"), InstallOutcome.UNREACHABLE),
        (DeadlineExceeded("too slow"), InstallOutcome.UNREACHABLE),
        (OSError(28, "No space left on device"), InstallOutcome.NO_SPACE),
    ],
)
def test_a_fetch_that_fails_is_counted_by_reason_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: InstallOutcome
) -> None:
    monkeypatch.setattr("echo_rollout.weights.watcher._RETRY_LEAST_S", 0.01)
    source = ScriptedSource(error)
    watch = Watch(source, tmp_path)
    watch.newest = manifest_of(5)

    async def script() -> None:
        await watch.until(lambda: bool(watch.installed), "the second try to succeed")

    watch.run(script)
    assert watch.outcomes(outcome) == 1
    assert source.asked == [5, 5]
    assert watch.installed == [SnapshotRef(version=5, sha256=manifest_of(5).sha256)]


def test_a_newer_manifest_ends_the_wait_for_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_rollout.weights.watcher._RETRY_LEAST_S", 600.0)
    source = ScriptedSource(ClusterUnreachable("nobody answers"))
    watch = Watch(source, tmp_path)
    watch.newest = manifest_of(1)

    async def script() -> None:
        await watch.until(lambda: watch.outcomes(InstallOutcome.UNREACHABLE) == 1, "the first try to fail")
        watch.newest = manifest_of(2)
        watch.watcher.wake()
        await watch.until(lambda: bool(watch.installed), "the newer version to be installed")

    watch.run(script)
    assert source.asked == [1, 2]


def test_what_arrived_of_a_version_that_was_followed_by_another_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_rollout.weights.watcher._RETRY_LEAST_S", 600.0)

    class Interrupted(ScriptedSource):
        def fetch(self, manifest: WeightManifest, folder: Path) -> None:
            if manifest.version < 2:
                partial_of(folder).mkdir()
            super().fetch(manifest, folder)

    watch = Watch(Interrupted(DeadlineExceeded("the line is dead")), tmp_path)
    watch.newest = manifest_of(1)

    async def script() -> None:
        await watch.until(lambda: watch.outcomes(InstallOutcome.UNREACHABLE) == 1, "the first try to fail")
        assert [path.name[:3] for path in tmp_path.iterdir()] == [".v1"], "the next try goes on there"
        watch.newest = manifest_of(2)
        watch.watcher.wake()
        await watch.until(lambda: bool(watch.installed), "the newer version")
        await watch.until(lambda: [path.name[:2] for path in tmp_path.iterdir()] == ["v2"], "the rest of version 1 to be removed")

    watch.run(script)


def test_versions_that_came_and_went_during_a_fetch_are_passed_over_and_old_files_are_removed(tmp_path: Path) -> None:
    watch = Watch(ScriptedSource(), tmp_path)
    watch.newest = manifest_of(0)

    async def script() -> None:
        await watch.until(lambda: len(watch.installed) == 1, "version 0")
        watch.newest = manifest_of(3)
        watch.watcher.wake()
        await watch.until(lambda: len(watch.installed) == 2, "version 3")
        await watch.until(lambda: len(list(tmp_path.iterdir())) == 1, "the files of version 0 to be removed")

    watch.run(script)
    assert [ref.version for ref in watch.installed] == [0, 3]
    assert watch.registry.get_sample_value("echo_rollout_versions_skipped_total") == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"v3-{manifest_of(3).sha256[:12]}"]


def test_a_version_that_the_engine_refused_is_not_offered_to_it_again(tmp_path: Path) -> None:
    source = ScriptedSource()
    watch = Watch(source, tmp_path, ScriptedEngine(reject=frozenset({1})))
    watch.newest = manifest_of(1)

    async def script() -> None:
        await watch.until(lambda: watch.outcomes(InstallOutcome.REJECTED) == 1, "version 1 to be refused")
        watch.watcher.wake()
        await watch.until(lambda: not list(tmp_path.iterdir()), "its files to be removed")
        watch.newest = manifest_of(2)
        watch.watcher.wake()
        await watch.until(lambda: bool(watch.installed), "version 2")

    watch.run(script)
    assert source.asked == [1, 2]


def test_weights_that_do_not_come_are_told_with_what_stands_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_rollout.weights.watcher._RETRY_LEAST_S", 600.0)
    watch = Watch(ScriptedSource(ClusterUnreachable("nobody answers")), tmp_path)

    def told() -> str:
        watch.watcher.look()
        watch.clock.advance(STANDSTILL_S)
        watch.watcher.look()
        return watch.notices.current().get("weights", "")

    assert told() == "No version to install for 20 s. None is published yet. Look at the learner's log."
    watch.newest = manifest_of(4)
    assert told() == "Version 4 is not installed for 40 s. The engine is starting."

    async def script() -> None:
        await watch.until(lambda: watch.outcomes(InstallOutcome.UNREACHABLE) == 1, "the first try to fail")
        assert "The last try failed (unreachable): nobody answers" in told()
        watch.newest = manifest_of(5)
        watch.watcher.wake()
        await watch.until(lambda: bool(watch.installed), "version 5")
        assert told() == ""
        watch.newest = manifest_of(6)
        assert "It is on its way. Version 5 is served meanwhile." in told()

    watch.run(script)
