"""One snapshot on its way to this worker. Each stripe comes from the worker before us, else from workers before that, else from the truth.

On the peers' loop; hashing, disk and truth have threads. A chunk is served to others as soon as it is written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field

from echo_bus.blobs.files import ArrivingFiles
from echo_bus.errors import BlobCorrupt, TransportError
from echo_core.dissemination import num_stripes, plan_chains
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.client import Pace, chunks_from
from echo_rollout.weights.peers.shelf import Held, Shelf
from echo_rollout.weights.peers.wire import PeerFault, PeerOptions, Request, Why, ranges_of
from echo_rollout.weights.sources import ChunkSource

logger = logging.getLogger(__name__)

# Peers that are asked for a stripe before the truth is.
_MOST_ASKED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerParts:
    """What all transfers of a worker share. `liars`: peers that sent wrong bytes and are never asked again."""

    options: PeerOptions
    truth: ChunkSource
    shelf: Shelf
    metrics: WorkerMetrics
    pace: Pace = field(default_factory=Pace)
    liars: set[str] = field(default_factory=set)


class Transfer:
    """Fills `arriving` with the chunks of `held`. `others`: names and addresses of the peers."""

    def __init__(self, parts: PeerParts, held: Held, arriving: ArrivingFiles, others: Mapping[str, str]) -> None:
        self._parts = parts
        self._held = held
        self._arriving = arriving
        self._others = others
        self._left_out: set[str] = set()
        self._writing = threading.Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """Write nothing more. Any thread; blocks while a chunk is written."""
        with self._writing:
            self._is_stopped = True

    async def run(self) -> None:
        """Return when every chunk has arrived. Raises the errors of the truth, or OSError."""
        num_chunks, members = len(self._held.chunks), sorted({self._parts.options.worker_id, *self._others})
        chains = plan_chains(members, num_stripes(num_chunks, len(members)))
        self._parts.shelf.put(self._held)
        bounds = [num_chunks * stripe // len(chains) for stripe in range(len(chains) + 1)]
        tasks = [
            asyncio.ensure_future(self._follow(chain, range(bounds[stripe], bounds[stripe + 1]))) for stripe, chain in enumerate(chains)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, chain: Sequence[str], stripe: range) -> None:
        """All chunks of one stripe: from workers before us in its chain, the nearest first, then from the truth, and if that fails from
        workers behind us.
        """
        place = chain.index(self._parts.options.worker_id)
        await self._from_peers(reversed(chain[:place]), stripe, place)
        if not (missing := self._missing(stripe)):
            return
        try:
            await asyncio.to_thread(self._from_truth, missing)
        except BlobCorrupt:
            raise
        except TransportError:
            # Retention may have deleted the chunks, or the broker may be unreachable, while other workers have them.
            await self._from_peers(iter(chain[place + 1 :]), stripe, place)
            if self._missing(stripe):
                raise

    async def _from_peers(self, names: Iterator[str], stripe: range, place: int) -> None:
        """Ask up to `_MOST_ASKED` of `names`, one after the other."""
        num_asked = 0
        for name in names:
            missing = self._missing(stripe)
            if not missing or num_asked == _MOST_ASKED:
                break
            if name in self._left_out or name in self._parts.liars:
                continue
            num_asked += 1
            try:
                await self._from_peer(name, missing, place)
            except PeerFault as exc:
                self._note(name, exc)

    async def _from_peer(self, name: str, missing: Sequence[int], place: int) -> None:
        """Take the chunks `missing` from one peer. Raises PeerFault if it does not send all of them."""
        parts, manifest = self._parts, self._held.manifest
        given = chunks_from(
            self._others[name],
            Request(manifest.run_id, manifest.sha256, ranges_of(missing)),
            self._held.chunks,
            parts.options,
            pace=parts.pace,
            hops=place,
        )
        async with aclosing(given):
            async for index, data in given:
                try:
                    await asyncio.to_thread(self._put, index, data)
                except BlobCorrupt as exc:
                    raise PeerFault(Why.WRONG, f"the bytes of its chunk {index} are wrong") from exc
                parts.metrics.peer_bytes.labels("received").inc(len(data))
                parts.shelf.tell()

    def _from_truth(self, missing: Sequence[int]) -> None:
        """Read chunks from the truth; on a thread. Raises as `ChunkSource.chunks`."""
        parts, held, loop = self._parts, self._held, self._parts.shelf.loop
        for first, end in ranges_of(missing):
            with closing(parts.truth.chunks(held.manifest, held.chunks[first:end], held.starts[first])) as given:
                for index, data in zip(range(first, end), given, strict=True):
                    self._put(index, data)
                    parts.metrics.peer_bytes.labels("truth").inc(len(data))
                    loop.call_soon_threadsafe(parts.shelf.tell)

    def _put(self, index: int, data: bytes) -> None:
        with self._writing:
            if self._is_stopped:
                raise TransportError("The transfer has ended.")
            self._arriving.put(index, data)

    def _missing(self, stripe: range) -> list[int]:
        return [index for index in stripe if index not in self._held.arrived]

    def _note(self, name: str, fault: PeerFault) -> None:
        """Ask `name` no more: for this stripe if it only waits, for the snapshot if it failed, never if it sent wrong bytes."""
        version = self._held.manifest.version
        self._parts.metrics.peers_left_out.labels(fault.why.value).inc()
        if fault.why is Why.WAITED:
            logger.info("Worker %s is passed over for a part of version %d: %s.", name, version, fault)
            return
        self._left_out.add(name)
        if fault.why is Why.WRONG:
            self._parts.liars.add(name)
        logger.warning("Worker %s (%s) is left out as a source of version %d: %s.", name, self._others[name], version, fault)
