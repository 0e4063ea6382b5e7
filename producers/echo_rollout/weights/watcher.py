"""From a manifest on `weights` to installed weights, without stopping generation.

    view's thread ──wake──▶ watcher (asyncio) ──▶ fetch (a thread): a source → files, verified → engine.install → acknowledged

Only the newest manifest counts: versions that are published while one is fetched are skipped. After a failure the old weights stay in
force; it is counted by reason, and tried again with back-off unless a newer manifest comes first. An interrupted transfer goes on where it
stopped. A snapshot that the engine refuses is not offered to it again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from echo_bus.blobs.files import partial_of
from echo_bus.clock import Clock
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_core.bottleneck import Place, Use
from echo_rollout.engines.engine import Engine, Snapshot, SnapshotRef, SnapshotRejected
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.sources import SnapshotSource
from echo_runtime.logs import logged_with
from echo_runtime.notices import Notices, Standstill
from echo_runtime.places import PlaceTimes
from echo_schemas.records import WeightManifest

logger = logging.getLogger(__name__)

_RETRY_LEAST_S, _RETRY_MOST_S = 0.2, 5.0


class InstallOutcome(StrEnum):
    """How the arrival of a snapshot ended."""

    INSTALLED = "installed"
    CORRUPT = "corrupt"
    LOST = "lost"
    UNREACHABLE = "unreachable"
    NO_SPACE = "no_space"
    REJECTED = "rejected"


# The first class that an error is of counts.
_FAILURES = (
    (BlobCorrupt, InstallOutcome.CORRUPT),
    (OffsetLost, InstallOutcome.LOST),
    (TransportError, InstallOutcome.UNREACHABLE),
    (OSError, InstallOutcome.NO_SPACE),
)


class WeightWatcher:
    """Follows `current` of one run. `run` it as a task; `wake` may be called from any thread once it runs."""

    def __init__(
        self,
        engine: Engine,
        source: SnapshotSource,
        *,
        newest: Callable[[], WeightManifest | None],
        folder: Path,
        on_installed: Callable[[SnapshotRef], None],
        places: PlaceTimes,
        notices: Notices,
        metrics: WorkerMetrics,
        clock: Clock,
    ) -> None:
        """`newest`: the manifest under `current`. `folder`: empty, for this watcher alone. `on_installed` acknowledges; on the loop."""
        self._engine = engine
        self._source = source
        self._newest = newest
        self._folder = folder
        self._on_installed = on_installed
        self._places = places
        self._metrics = metrics
        self._clock = clock
        self._standstill = Standstill(notices, "weights", clock)
        self._doing = "The engine is starting."
        self._changed = asyncio.Event()
        self._refused: set[str] = set()
        self._kept: dict[int, Path] = {}
        self._fetching = ThreadPoolExecutor(1, "fetch")

    def wake(self) -> None:
        """Look again. On the loop's thread: from others, by `call_soon_threadsafe`."""
        self._changed.set()

    async def run(self) -> None:
        """Install what is newest, until cancelled."""
        retry_s = _RETRY_LEAST_S
        try:
            while True:
                self._changed.clear()
                manifest = self._newest()
                if manifest is None or self._is_settled(manifest):
                    with self._places.spent(Place.INSTALL, Use.EMPTY):
                        await self._changed.wait()
                    continue
                self._doing = "It is on its way."
                with self._places.spent(Place.INSTALL), logged_with(version=manifest.version):
                    outcome = await self._arrive(manifest)
                self._metrics.installs.labels(outcome.value).inc()
                if outcome in {InstallOutcome.INSTALLED, InstallOutcome.REJECTED}:
                    retry_s = _RETRY_LEAST_S
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), retry_s)
                retry_s = min(_RETRY_MOST_S, retry_s * 2)
        finally:
            self._fetching.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """Report missing or old weights. Call it regularly, on the loop's thread."""
        manifest, installed = self._newest(), self._engine.installed
        if manifest is None:
            self._standstill.stands("No version to install", lambda: "None is published yet. Look at the learner's log.")
        elif self._is_settled(manifest):
            self._standstill.moves()
        else:
            meanwhile = "" if installed is None else f" Version {installed.version} is served meanwhile."
            self._standstill.stands(f"Version {manifest.version} is not installed", lambda: f"{self._doing}{meanwhile}")

    def _is_settled(self, manifest: WeightManifest) -> bool:
        """Whether `manifest` is installed or refused."""
        return manifest.sha256 in self._refused or _ref_of(manifest) == self._engine.installed

    async def _arrive(self, manifest: WeightManifest) -> InstallOutcome:
        """Fetch, verify, install, acknowledge; after a failure the old weights stay in force."""
        started_s = self._clock.monotonic_s()
        folder = self._folder / f"v{manifest.version}-{manifest.sha256[:12]}"
        for partial in self._folder.glob(partial_of(Path("v*")).name):
            if partial != partial_of(folder):
                # Of an older version, whose transfer will not go on.
                self._remove(partial)
        try:
            if not folder.exists():
                await asyncio.get_running_loop().run_in_executor(self._fetching, self._source.fetch, manifest, folder)
            before = self._engine.installed
            await self._engine.install(Snapshot(ref=_ref_of(manifest), kind=manifest.kind, folder=folder))
        except SnapshotRejected as exc:
            self._refused.add(manifest.sha256)
            self._remove(folder)
            return self._failed(manifest, InstallOutcome.REJECTED, exc)
        except (TransportError, OSError) as exc:
            return self._failed(manifest, next(outcome for kind, outcome in _FAILURES if isinstance(exc, kind)), exc)
        self._on_installed(_ref_of(manifest))
        seconds = self._clock.monotonic_s() - started_s
        self._metrics.install_seconds.observe(seconds)
        self._metrics.installed.set(manifest.version)
        if before is not None and manifest.parent is not None and before.version < manifest.parent:
            self._metrics.skipped.inc()
        logger.info("Version %d (%s) is installed, %.3f s after its manifest", manifest.version, manifest.sha256[:12], seconds)
        self._kept[manifest.version] = folder
        self._remove_unused()
        return InstallOutcome.INSTALLED

    def _failed(self, manifest: WeightManifest, outcome: InstallOutcome, error: Exception) -> InstallOutcome:
        logger.warning("Version %d is not installed (%s), the old one stays: %s", manifest.version, outcome.value, error)
        self._doing = f"The last try failed ({outcome.value}): {error}"
        return outcome

    def _remove_unused(self) -> None:
        """Remove the folders of versions that the engine no longer needs."""
        in_use = self._engine.in_use
        for version in [version for version in self._kept if version not in in_use]:
            self._remove(self._kept.pop(version))

    def _remove(self, folder: Path) -> None:
        """Remove a folder on the fetching thread: freeing a large snapshot's memory takes time."""
        self._fetching.submit(shutil.rmtree, folder, ignore_errors=True)


def _ref_of(manifest: WeightManifest) -> SnapshotRef:
    return SnapshotRef(version=manifest.version, sha256=manifest.sha256)
