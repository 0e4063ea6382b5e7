"""Snapshots of versions that are not the newest: fetched when an evaluation needs them, and the last two kept.

On the worker's asyncio loop; fetching has a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from echo_bus.blobs.files import partial_of
from echo_bus.errors import TransportError
from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_rollout.weights.sources import SnapshotSource
from echo_schemas.errors import EchoError
from echo_schemas.records import WeightManifest

logger = logging.getLogger(__name__)

# Evaluations come one after the other, each of a newer version than the one before.
_KEPT = 2


class VersionNotKept(EchoError):
    """The weights of a version are not available any more."""


class OlderSnapshots:
    """Fetches each version once. `close` it."""

    def __init__(
        self,
        source: SnapshotSource,
        folder: Path,
        *,
        manifest_of: Callable[[int], WeightManifest | None],
        in_use: Callable[[], frozenset[int]],
    ) -> None:
        """`folder`: may be shared. `manifest_of`: the manifest under `<run>/v/<n>`; may block and raise TransportError. `in_use`: versions
        that the engine needs."""
        self._source = source
        self._folder = folder
        self._manifest_of = manifest_of
        self._in_use = in_use
        self._fetched: OrderedDict[int, asyncio.Task[Snapshot]] = OrderedDict()
        self._users: dict[int, int] = {}
        self._fetching = ThreadPoolExecutor(1, "fetch older")

    async def fetch(self, version: int) -> Snapshot:
        """The verified files of `version`, which stay until `release`. Raises VersionNotKept."""
        task = self._fetched.get(version)
        if task is None or (task.done() and task.exception() is not None):
            task = self._fetched[version] = asyncio.get_running_loop().create_task(self._fetch(version))
        self._fetched.move_to_end(version)
        self._users[version] = self._users.get(version, 0) + 1
        try:
            # Shielded: a caller that is cancelled must not cancel the fetch for the others.
            return await asyncio.shield(task)
        except BaseException:  # cancelled or failed: either way the caller does not have it
            self.release(version)
            raise

    def release(self, version: int) -> None:
        """A caller of `fetch` no longer needs `version`."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
        for old in [each for each in self._fetched if each not in self._users and each not in self._in_use()][:-_KEPT]:
            self._forget(old)

    def close(self) -> None:
        self._fetching.shutdown(wait=False, cancel_futures=True)

    async def _fetch(self, version: int) -> Snapshot:
        loop = asyncio.get_running_loop()
        try:
            manifest = await loop.run_in_executor(self._fetching, self._manifest_of, version)
        except TransportError as exc:
            raise VersionNotKept(f"The manifest of version {version} cannot be read: {exc}") from exc
        if manifest is None:
            raise VersionNotKept(f"There is no manifest of version {version}.")
        folder = self._folder / f"older-v{version}-{manifest.sha256[:12]}"
        try:
            if not folder.exists():
                await loop.run_in_executor(self._fetching, self._source.fetch, manifest, folder)
        except (TransportError, OSError) as exc:
            # It may never be asked for again.
            self._fetching.submit(shutil.rmtree, partial_of(folder), ignore_errors=True)
            raise VersionNotKept(f"The weights of version {version} cannot be fetched: {exc}") from exc
        return Snapshot(ref=SnapshotRef(version=version, sha256=manifest.sha256), kind=manifest.kind, folder=folder)

    def _forget(self, version: int) -> None:
        task = self._fetched.pop(version)
        if task.done() and not task.cancelled() and task.exception() is None:
            self._fetching.submit(shutil.rmtree, task.result().folder, ignore_errors=True)
