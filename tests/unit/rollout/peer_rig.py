"""Workers that pass a snapshot on, over the loopback, and peers that do it wrongly; the truth is in memory."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from echo_bus.errors import TransportError
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.peers.wire import PeerFault, PeerOptions, Request, hear
from echo_schemas.records import ChunkRef, WeightFile, WeightKind, WeightManifest

RUN, SECRET = "demo", b"the secret of the run, 32 bytes."
CHUNK = 1000


def data_of(num_chunks: int, version: int = 1) -> bytes:
    """Bytes that end within a chunk."""
    return b"".join(hashlib.sha256(f"{version} {number}".encode()).digest() for number in range(num_chunks * CHUNK // 32 - 1))


def manifest_of(data: bytes, version: int = 1) -> WeightManifest:
    """Two files, the first of which ends within a chunk."""
    parts = {"model.safetensors": data[:-350], "config.json": data[-350:]}
    return WeightManifest(
        run_id=RUN,
        version=version,
        kind=WeightKind.LORA,
        files=tuple(WeightFile(name=name, num_bytes=len(part), sha256=hashlib.sha256(part).hexdigest()) for name, part in parts.items()),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        uri="memory://truth",
        session="s",
        checkpoint="c",
        next_seq=0,
        created_ms=0,
    )


class MemoryTruth:
    """Snapshots by checksum. `given`: indices of chunks, in order. `fails_after`: so many chunks of each call; `alter` what is given."""

    def __init__(self, *snapshots: bytes) -> None:
        self._snapshots = {hashlib.sha256(data).hexdigest(): data for data in snapshots}
        self.given: list[int] = []
        self.whole = 0
        self.fails_after: int | None = None
        self.alter: Callable[[bytes], bytes] = bytes

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        data = self._snapshots[manifest.sha256]
        pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        return tuple(
            ChunkRef(index=index, offset=0, num_bytes=len(piece), sha256=hashlib.sha256(piece).hexdigest())
            for index, piece in enumerate(pieces)
        )

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        folder.mkdir()
        self.whole += 1

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        for number, chunk in enumerate(wanted):
            if self.fails_after is not None and number >= self.fails_after:
                raise TransportError("the truth is away")
            self.given.append(chunk.index)
            yield self.alter(self._snapshots[manifest.sha256][start : start + chunk.num_bytes])
            start += chunk.num_bytes


class Rig:
    """Workers and others by name; each worker's `metric` and folder."""

    def __init__(self, folder: Path, truth: MemoryTruth) -> None:
        self.folder = folder
        self.truth = truth
        self.addresses: dict[str, str] = {}
        self.sources: dict[str, PeerSource] = {}
        self.registries: dict[str, CollectorRegistry] = {}

    def add(self, name: str, **options: Any) -> PeerSource:
        """A worker that serves."""
        self.registries[name] = CollectorRegistry()
        made = PeerSource(
            self.truth,
            PeerOptions(**{"worker_id": name, "run_id": RUN, "secret": SECRET, **options}),
            neighbours=lambda: {other: address for other, address in self.addresses.items() if other != name},
            metrics=WorkerMetrics(self.registries[name]),
        ).start()
        self.sources[name] = made
        self.addresses[name] = made.address
        return made

    def fetch(self, name: str, manifest: WeightManifest) -> bytes:
        """The bytes that `name` has got."""
        folder = self.folder / name / f"v{manifest.version}"
        self.sources[name].fetch(manifest, folder)
        return b"".join((folder / file.name).read_bytes() for file in manifest.files)

    def fetch_all(self, manifest: WeightManifest) -> dict[str, bytes]:
        """By all at once."""
        with ThreadPoolExecutor(len(self.sources)) as pool:
            return dict(zip(self.sources, pool.map(lambda name: self.fetch(name, manifest), self.sources), strict=True))

    def metric(self, name: str, metric: str, **labels: str) -> float:
        return self.registries[name].get_sample_value(f"echo_rollout_{metric}_total", labels) or 0.0


@contextmanager
def rig(folder: Path, truth: MemoryTruth) -> Iterator[Rig]:
    made = Rig(folder, truth)
    try:
        yield made
    finally:
        for source in made.sources.values():
            source.close()


Serve = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def peer(serve: Serve) -> Iterator[tuple[str, list[Request]]]:
    """A peer that knows the run's secret and then does what `serve` does. Yields its address and what it was asked."""
    loop, asked = asyncio.new_event_loop(), []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, EOFError, PeerFault):
                asked.append(await hear(reader, writer, SECRET))
                await serve(asked[-1], reader, writer)
        finally:
            writer.transport.abort()

    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
