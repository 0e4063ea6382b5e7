"""The verified chunks that a worker may serve, by snapshot. On the peers' loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from echo_bus.blobs.files import partial_of, read_span
from echo_schemas.records import ChunkRef, WeightManifest

# The version that arrives, the one in force, and one that is still in use.
_KEPT = 3


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot that is complete or arriving; `arrived` grows meanwhile."""

    manifest: WeightManifest
    chunks: tuple[ChunkRef, ...]
    folder: Path
    arrived: Set[int]
    starts: tuple[int, ...]
    """Where each chunk begins."""

    def read(self, index: int) -> bytes:
        """A chunk that has arrived. Blocks; raises OSError when the files are gone."""
        start, num_bytes = self.starts[index], self.chunks[index].num_bytes
        try:
            data = read_span(partial_of(self.folder), self.manifest.files, start, num_bytes)
        except FileNotFoundError:
            data = read_span(self.folder, self.manifest.files, start, num_bytes)
        if len(data) != num_bytes:
            raise FileNotFoundError(self.folder)
        return data


class Shelf:
    """The newest snapshots, by checksum."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._news = asyncio.Event()

    def put(self, held: Held) -> None:
        """`held` may be served from now on."""
        self._held[held.manifest.sha256] = held
        self._held.move_to_end(held.manifest.sha256)
        while len(self._held) > _KEPT:
            self._held.popitem(last=False)
        self.tell()

    def remove(self, sha256: str) -> None:
        """Serve the snapshot no more."""
        self._held.pop(sha256, None)
        self.tell()

    def tell(self) -> None:
        """Wake the connections that wait for a chunk."""
        self._news.set()
        self._news = asyncio.Event()

    def find(self, sha256: str) -> Held | None:
        """The snapshot; None if it is not here, or not yet."""
        return self._held.get(sha256)

    async def wait_for(self, sha256: str, index: int) -> Held:
        """Wait until the chunk has arrived."""
        while (held := self._held.get(sha256)) is None or index not in held.arrived:
            await self._news.wait()
        return held
