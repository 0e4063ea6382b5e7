"""Sources of a snapshot's files: the log or the store, in which the learner published them. `peers` builds on these."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol

from echo_bus.blobs.chunk_list import read_chunk_list
from echo_bus.blobs.transfer import BlobReader
from echo_bus.bus import Bus
from echo_bus.errors import BlobCorrupt
from echo_rollout.weights.store import StoreSource
from echo_schemas.records import BlobRef, ChunkRef, WeightManifest
from echo_schemas.topics import WEIGHTS, weights_key


class SnapshotSource(Protocol):
    """Where the files of a manifest come from."""

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """All files into the new folder `folder`, verified. Blocks, for as long as bytes come.

        Raises BlobCorrupt, OffsetLost, another TransportError, or OSError. Only another TransportError leaves something behind: the bytes
        so far, in `partial_of(folder)`, where the next call goes on.
        """


class ChunkSource(SnapshotSource, Protocol):
    """A source that also gives parts of a snapshot."""

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """All chunks of the snapshot with their checksums; none if the learner wrote no list of them. Blocks and raises as `fetch`."""

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """Neighbouring chunks, at least one, not verified. `start`: the byte at which the first begins. Blocks and raises as `fetch`."""


def published_manifest(bus: Bus, run_id: str, version: int) -> WeightManifest | None:
    """The manifest of a published version, read when it is needed, since few ever are. Blocks; raises TransportError."""
    key = weights_key(run_id, version)
    return bus.newest(WEIGHTS, WeightManifest, only=key).get(key)


class PublishedSource:
    """Chunks on `weights.chunks` if the manifest names a blob there; else the store."""

    def __init__(self, reader: BlobReader, store: str = "") -> None:
        """`store`: [store] uri; empty: a folder of this machine, beside the learner's checkpoints."""
        self._reader = reader
        self._store = StoreSource(store)

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """In the manifest, or in a blob of its own where they are many or the snapshot is in a store."""
        if manifest.blob is not None and manifest.blob.chunks:
            return _log_chunks(manifest)
        if manifest.chunk_list is None:
            return ()
        return read_chunk_list(self._reader.read(manifest.chunk_list, manifest.run_id), manifest.num_bytes)

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        if manifest.blob is None:
            self._store.fetch(manifest, folder)
        else:
            self._reader.read_files(_blob_of(manifest), manifest.run_id, manifest.files, folder)

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        if manifest.blob is None:
            return self._store.chunks(manifest, wanted, start)
        return self._reader.read_chunks(_blob_of(manifest), manifest.run_id, wanted[0].index, wanted[-1].index + 1)


def _log_chunks(manifest: WeightManifest) -> tuple[ChunkRef, ...]:
    chunks = _blob_of(manifest).chunks
    if sum(chunk.num_bytes for chunk in chunks) != manifest.num_bytes or any(chunk.index != place for place, chunk in enumerate(chunks)):
        raise BlobCorrupt(f"The manifest of version {manifest.version} and its list of chunks do not describe the same bytes.")
    return chunks


def _blob_of(manifest: WeightManifest) -> BlobRef:
    """Raises BlobCorrupt for a manifest that contradicts itself."""
    if manifest.blob is None or manifest.blob.sha256 != manifest.sha256:
        raise BlobCorrupt(f"The manifest of version {manifest.version} and its blob name different checksums.")
    return manifest.blob
