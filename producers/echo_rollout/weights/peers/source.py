"""Snapshots from peers and from the truth, behind the one protocol of all sources.

    fetch's thread ──▶ peers' loop: Transfer ─▶ chunks, verified, served from then on
          └──── all chunks there: files and whole verified ──▶ the folder gets its name

Threads: `fetch` blocks its caller; connections live on a loop of their own, so that a transfer never holds up the sampling of groups;
hashing, disk and the truth have threads of their own. What is decided and why: docs/decisions/0022.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from echo_bus.blobs.files import ArrivingFiles, starts_of
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.server import PeerServer
from echo_rollout.weights.peers.shelf import Held, Shelf
from echo_rollout.weights.peers.transfer import PeerParts, Transfer
from echo_rollout.weights.sources import ChunkSource
from echo_schemas.records import ChunkRef, WeightManifest

T = TypeVar("T")
# Reading the truth and the disk blocks; each stripe has one thread at a time.
_NUM_THREADS = 24
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How peers meet. `advertise`: the host that others are told. `tls`: contexts of the server and of the client. Below `least_bytes` or
    `least_workers` a snapshot comes from the truth. `down` and `up`: what may pass.
    """

    worker_id: str
    run_id: str
    secret: bytes
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = "127.0.0.1"
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
    least_bytes: int = 0
    least_workers: int = 2
    down: Line = field(default_factory=Line)
    up: Line = field(default_factory=Line)


class PeerSource:
    """`start` it, and `close` it. `neighbours`: names and addresses of the living peers but this one, now."""

    def __init__(
        self, truth: ChunkSource, options: PeerOptions, *, neighbours: Callable[[], Mapping[str, str]], metrics: WorkerMetrics
    ) -> None:
        self._truth = truth
        self._options = options
        self._neighbours = neighbours
        self.address = ""
        """Where others ask: host:port; empty before `start`."""
        self._metrics = metrics
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "peers")
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="peers", daemon=True)
        server_tls, client_tls = options.tls or (None, None)
        shelf = Shelf(self._loop)
        self._parts = PeerParts(
            worker_id=options.worker_id,
            secret=options.secret,
            truth=truth,
            shelf=shelf,
            tls=client_tls,
            line=options.down,
            metrics=metrics,
        )
        self._server = PeerServer(shelf, run_id=options.run_id, secret=options.secret, tls=server_tls, line=options.up, metrics=metrics)

    def start(self) -> Self:
        """Serve. Raises UserError where that is not possible."""
        self._thread.start()
        try:
            port = self._run(self._server.start(self._options.host, self._options.port)).result()
        except BaseException:  # nobody closes what did not start
            self.close()
            raise
        host = self._options.advertise
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self

    def close(self) -> None:
        """Serve nobody any more; a fetch under way ends with CancelledError. Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._run(self._end()).result(_END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """As `SnapshotSource.fetch`."""
        others = dict(self._neighbours())
        chunks: tuple[ChunkRef, ...] = ()
        if manifest.num_bytes >= self._options.least_bytes and len(others) + 1 >= self._options.least_workers:
            chunks = self._truth.chunk_refs(manifest)
        if not chunks:
            self._truth.fetch(manifest, folder)
            self._metrics.peer_bytes.labels("truth").inc(manifest.num_bytes)
            return
        with ArrivingFiles(folder, manifest.files, manifest.sha256, chunks) as arriving:
            transfer = Transfer(self._parts, Held(manifest, chunks, folder, arriving.arrived, starts_of(chunks)), arriving, others)
            try:
                self._run(transfer.run()).result()
                arriving.complete()
            except BaseException:  # whatever ends it: nothing of it may be served any more, since the files go
                transfer.stop()
                with suppress(RuntimeError):  # the loop is closed, so nothing is served
                    self._loop.call_soon_threadsafe(self._parts.shelf.remove, manifest.sha256)
                raise

    def hold(self, manifest: WeightManifest, folder: Path) -> None:
        """Serve a whole snapshot that came another way. Blocks; raises as `ChunkSource.chunk_refs`."""
        if not (chunks := self._truth.chunk_refs(manifest)):
            return
        held = Held(manifest, chunks, folder, frozenset(range(len(chunks))), starts_of(chunks))
        self._loop.call_soon_threadsafe(self._parts.shelf.put, held)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _end(self) -> None:
        await self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
