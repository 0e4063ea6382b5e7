"""A snapshot made of an older one and the deltas since; from another source where that is not possible.

On the thread that fetches. A worker that missed versions applies their deltas one after another; only the result is hashed and written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from echo_bus.blobs.delta import BLOCK_BYTES, patch
from echo_bus.blobs.files import ArrivingFiles, partial_of, read_span
from echo_bus.blobs.transfer import BlobReader
from echo_bus.errors import TransportError
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.sources import SnapshotSource
from echo_schemas.records import BlobRef, WeightManifest

logger = logging.getLogger(__name__)

# Above this share of the snapshot's bytes, or so many versions back, the whole is fetched.
_MOST_SHARE = 0.5
_MOST_VERSIONS = 8


class DeltaSource:
    """Remembers the snapshot that was fetched last. `whole`: the source of snapshots that no delta leads to."""

    def __init__(
        self,
        whole: SnapshotSource,
        reader: BlobReader,
        *,
        manifest_of: Callable[[int], WeightManifest | None],
        on_built: Callable[[WeightManifest, Path], None],
        metrics: WorkerMetrics,
    ) -> None:
        """`manifest_of`: of a version; may block and raise TransportError. `on_built`: called with a snapshot that was made here."""
        self._whole = whole
        self._reader = reader
        self._manifest_of = manifest_of
        self._on_built = on_built
        self._metrics = metrics
        self._base: tuple[WeightManifest, Path] | None = None

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        if not self._build(manifest, folder):
            self._whole.fetch(manifest, folder)
        self._base = (manifest, folder)

    def _build(self, manifest: WeightManifest, folder: Path) -> bool:
        """Make the snapshot of deltas; False if that is not possible."""
        # An interrupted transfer that goes on costs less than a delta.
        if self._base is None or manifest.delta is None or partial_of(folder).exists():
            return False
        base, base_folder = self._base
        try:
            deltas = [self._reader.read(ref, manifest.run_id) for ref in self._chain(base, manifest)]
            if not deltas:
                return False
            pieces: Iterable[bytes] = _pieces(base, base_folder)
            for delta in deltas:
                pieces = patch(pieces, delta)
            with ArrivingFiles(folder, manifest.files, manifest.sha256) as arriving:
                for piece in pieces:
                    arriving.add(piece)
                arriving.complete()
        except (TransportError, FileNotFoundError) as exc:
            logger.warning("Version %d could not be made of version %d, so it is fetched whole: %s", manifest.version, base.version, exc)
            return False
        self._metrics.delta_bytes.inc(sum(map(len, deltas)))
        try:
            self._on_built(manifest, folder)
        except TransportError as exc:
            logger.warning("Version %d is not passed on: %s", manifest.version, exc)
        return True

    def _chain(self, base: WeightManifest, manifest: WeightManifest) -> list[BlobRef]:
        """The deltas from `base` to `manifest`, in order; empty if there are none, or if they are too many or too large."""
        found: list[BlobRef] = []
        each: WeightManifest | None = manifest
        while each is not None and each.delta is not None and each.parent is not None and len(found) < _MOST_VERSIONS:
            found.insert(0, each.delta)
            if sum(ref.num_bytes for ref in found) > _MOST_SHARE * manifest.num_bytes:
                return []
            if each.parent_sha256 == base.sha256:
                return found
            if each.parent <= base.version:
                return []
            parent = self._manifest_of(each.parent)
            each = parent if parent is not None and parent.sha256 == each.parent_sha256 else None
        return []


def _pieces(manifest: WeightManifest, folder: Path) -> Iterator[bytes]:
    for start in range(0, manifest.num_bytes, BLOCK_BYTES):
        yield read_span(folder, manifest.files, start, min(BLOCK_BYTES, manifest.num_bytes - start))
