"""Where the files of a snapshot come from: the log or the store, which are the truth; `peers` stands on both."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol

from echo_bus.blobs.chunk_list import read_chunk_list
from echo_bus.blobs.transfer import BlobReader
from echo_bus.errors import BlobCorrupt
from echo_rollout.weights.store import StoreSource
from echo_schemas.records import BlobRef, ChunkRef, WeightManifest


class SnapshotSource(Protocol):
    """Where the files of a manifest come from."""

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """All files into the new folder `folder`, verified. Blocks, for as long as something comes.

        What a TransportError other than the first two interrupts stays in `partial_of(folder)`, and the next call goes on there; nothing
        else stays. Raises BlobCorrupt, OffsetLost, another TransportError, or OSError.
        """


class ChunkSource(SnapshotSource, Protocol):
    """One that also gives a part of a snapshot."""

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """All chunks of the snapshot with their checksums, as its learner wrote them; none if it did not. Blocks and raises as `fetch`."""

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """Neighbouring chunks, at least one, not verified. `start`: the byte at which the first begins. Blocks and raises as `fetch`."""


class LogSource:
    """Chunks on `weights.chunks`."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """The blob that the manifest names."""
        blob = _blob_of(manifest)
        self._reader.read_files(blob, manifest.run_id, manifest.files, folder)

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """By their indices; `start` says nothing more."""
        del start
        return self._reader.read_chunks(_blob_of(manifest), manifest.run_id, wanted[0].index, wanted[-1].index + 1)


class PublishedSource:
    """The log or the store, as each manifest says."""

    def __init__(self, reader: BlobReader, store: str = "") -> None:
        """`store`: [store] uri; empty: a folder of this machine, beside the learner's checkpoints."""
        self._reader = reader
        self._log = LogSource(reader)
        self._store = StoreSource(store)

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """In the manifest, or in a blob of its own where they are many or the snapshot is in a store."""
        if manifest.blob is not None and manifest.blob.chunks:
            return _log_chunks(manifest)
        if manifest.chunk_list is None:
            return ()
        return read_chunk_list(self._reader.read(manifest.chunk_list, manifest.run_id), manifest.num_bytes)

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """From where it was published."""
        self._of(manifest).fetch(manifest, folder)

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """From where it was published."""
        return self._of(manifest).chunks(manifest, wanted, start)

    def _of(self, manifest: WeightManifest) -> LogSource | StoreSource:
        return self._log if manifest.blob is not None else self._store


def _log_chunks(manifest: WeightManifest) -> tuple[ChunkRef, ...]:
    chunks = _blob_of(manifest).chunks
    if sum(chunk.num_bytes for chunk in chunks) != manifest.num_bytes or any(chunk.index != place for place, chunk in enumerate(chunks)):
        raise BlobCorrupt(f"The manifest of version {manifest.version} and its list of chunks do not describe the same bytes.")
    return chunks


def _blob_of(manifest: WeightManifest) -> BlobRef:
    """Raises BlobCorrupt for a manifest that contradicts itself."""
    if manifest.blob is None or manifest.blob.sha256 != manifest.sha256:
        raise BlobCorrupt(f"The manifest of version {manifest.version} and its blob do not promise the same checksum.")
    return manifest.blob
