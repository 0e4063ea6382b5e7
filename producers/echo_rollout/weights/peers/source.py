"""Snapshots from peers and from the truth (the log or the store), as a `SnapshotSource`.

    fetch's thread ──▶ peers' loop: Transfer ─▶ chunks, verified, served from then on
          └──── all chunks there: files and whole verified ──▶ the folder gets its name

Threads: `fetch` blocks its caller; connections run on a loop of their own, so that a transfer never delays the sampling of groups; hashing,
disk and the truth have threads of their own. Decisions and reasons: docs/decisions/0022.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from echo_bus.blobs.files import ArrivingFiles, starts_of
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.server import PeerServer
from echo_rollout.weights.peers.shelf import Held, Shelf
from echo_rollout.weights.peers.transfer import PeerParts, Transfer
from echo_rollout.weights.peers.wire import PeerOptions
from echo_rollout.weights.sources import ChunkSource
from echo_schemas.records import ChunkRef, WeightManifest

T = TypeVar("T")
# Reading the truth and the disk blocks; each stripe has one thread at a time.
_NUM_THREADS = 24
_END_S = 5.0


class PeerSource:
    """`start` it, and `close` it. `neighbours`: names and addresses of the living peers but this one, now."""

    def __init__(
        self, truth: ChunkSource, options: PeerOptions, *, neighbours: Callable[[], Mapping[str, str]], metrics: WorkerMetrics
    ) -> None:
        self._truth = truth
        self._options = options
        self._neighbours = neighbours
        self.address = ""
        """host:port for other workers; empty before `start`."""
        self._metrics = metrics
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "peers")
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="peers", daemon=True)
        shelf = Shelf(self._loop)
        self._parts = PeerParts(options=options, truth=truth, shelf=shelf, metrics=metrics)
        self._server = PeerServer(shelf, options, metrics)

    def start(self) -> Self:
        """Serve. Raises UserError where that is not possible."""
        self._thread.start()
        try:
            port = self._run(self._server.start()).result()
        except BaseException:  # a source that did not start is not closed by its owner
            self.close()
            raise
        host = self._options.advertise
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self

    def close(self) -> None:
        """Stop serving; a fetch under way ends with CancelledError. Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._run(self._end()).result(_END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
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
            except BaseException:  # after any error its chunks may not be served any more: the files are removed
                transfer.stop()
                with suppress(RuntimeError):  # the loop is closed, so nothing is served
                    self._loop.call_soon_threadsafe(self._parts.shelf.remove, manifest.sha256)
                raise

    def hold(self, manifest: WeightManifest, folder: Path) -> None:
        """Serve a complete snapshot that another source made. Blocks; raises as `ChunkSource.chunk_refs`."""
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
