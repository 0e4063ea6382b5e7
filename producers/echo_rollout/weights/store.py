"""Snapshots in the run's store: any address that fsspec knows, or a folder of this machine."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from echo_bus.blobs.files import ArrivingFiles
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_schemas.records import ChunkRef, WeightManifest

_PIECE_BYTES = 1 << 20


class StoreSource:
    """Reads a manifest's `uri` if that is the snapshot's place in the store: a forged record cannot make a worker open another address."""

    def __init__(self, uri: str = "") -> None:
        """`uri`: [store] uri; empty: a folder of this machine, beside the learner's checkpoints."""
        self._uri = uri

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """All files, each verified, and the whole against the manifest."""
        store, root = self._place(manifest)
        with ArrivingFiles(folder, manifest.files, manifest.sha256) as arriving:
            with closing(_pieces(store, root, manifest, arriving.num_bytes, manifest.num_bytes)) as pieces:
                for piece in pieces:
                    arriving.add(piece)
            arriving.complete()

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """Neighbouring chunks, the first of which begins at byte `start`."""
        store, root = self._place(manifest)
        end = start + sum(chunk.num_bytes for chunk in wanted)
        gathered = bytearray()
        sizes = iter([chunk.num_bytes for chunk in wanted])
        size = next(sizes)
        with closing(_pieces(store, root, manifest, start, end)) as pieces:
            for piece in pieces:
                gathered += piece
                while size and len(gathered) >= size:
                    yield bytes(gathered[:size])
                    del gathered[:size]
                    size = next(sizes, 0)

    def _place(self, manifest: WeightManifest) -> tuple[Any, str]:
        """The store and the snapshot's folder in it. Raises TransportError."""
        place = f"{manifest.run_id}/v{manifest.version}-{manifest.sha256[:12]}"
        try:
            import fsspec

            if self._uri:
                store, top = fsspec.core.url_to_fs(self._uri)
                root = f"{top.rstrip('/')}/{place}"
                is_there = manifest.uri == str(store.unstrip_protocol(root))
            else:
                store, root = fsspec.filesystem("file"), (manifest.uri or "").removeprefix("file://")
                is_there = root != manifest.uri and root == os.path.normpath(root) and root.endswith(f"/snapshots/{place}")
        except (ImportError, ValueError) as exc:
            raise TransportError(f"{self._uri} cannot be read: {exc}.", hint="Install the fsspec driver that it names.") from exc
        if not is_there:
            where = f"{self._uri} ([store] uri)" if self._uri else "a folder of this machine, as an empty [store] uri says"
            raise TransportError(
                f"Version {manifest.version} lies at {manifest.uri}, which is not its place in {where}; it is not opened.",
                hint="Give the workers the learner's [store] uri.",
            )
        return store, root


def _pieces(store: Any, root: str, manifest: WeightManifest, start: int, end: int) -> Generator[bytes, None, None]:
    """The bytes from `start` to before `end` of all files, one after another."""
    for file in manifest.files:
        yield from _remote_pieces(store, f"{root}/{file.name}", manifest, max(0, min(start, file.num_bytes)), min(end, file.num_bytes))
        start, end = start - file.num_bytes, end - file.num_bytes


def _remote_pieces(store: Any, path: str, manifest: WeightManifest, start: int, end: int) -> Generator[bytes, None, None]:
    """The bytes of one file in a store, from `start` to `end`, which it must have. Raises BlobCorrupt, OffsetLost, TransportError."""
    if start >= end:
        return
    try:
        with store.open(path, "rb") as remote:
            remote.seek(start)
            while start < end and (piece := remote.read(min(_PIECE_BYTES, end - start))):
                start += len(piece)
                yield piece
    except FileNotFoundError as exc:
        raise OffsetLost(
            f"A file of {manifest.uri} is not there: {exc}.",
            hint="A file:// address names another folder on each machine: [store] uri must be an address that learner and workers share.",
        ) from exc
    except Exception as exc:  # a driver may raise the errors of any library below it
        raise TransportError(f"A file of {manifest.uri} cannot be read: {exc!r}.") from exc
    if start < end:
        raise BlobCorrupt(f"The file {path} ends {end - start} bytes before it should.")
