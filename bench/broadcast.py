"""How long a snapshot takes to all workers: from worker to worker in striped chains, and straight from its place (star).

    python bench/broadcast.py [--mb 64] [--mbit 100] [--workers 2 4 8] [--json FILE]

The workers' own transfer over the loopback: sockets, checksums, files in shared memory. Token buckets in it hold each worker to --mbit in
each direction, and so the place where the snapshot lies: a learner's line that is no better than a worker's. `limit_s` is size / line. The
time is that of the last worker. Needs no Kafka.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from echo_bus.blobs.chunk_list import list_chunks, read_chunk_list
from echo_bus.blobs.files import ArrivingFiles
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.source import PeerOptions, PeerSource
from echo_schemas.records import ChunkRef, WeightFile, WeightKind, WeightManifest

RUN, SECRET = "broadcast", b"a secret that is no secret at all"
_BYTES_PER_MBIT = 125_000
_STAR = 1 << 20  # workers; fewer than so many take a snapshot from its place


class Place:
    """Where the snapshot lies, as one worker sees it: behind a line that all share, and the worker's own."""

    def __init__(self, data: bytes, chunks: tuple[ChunkRef, ...], shared: Line, own: Line) -> None:
        self._data = data
        self._chunks = chunks
        self._lines = (shared, own)

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """All of them."""
        del manifest
        return self._chunks

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """Everything, in order."""
        with ArrivingFiles(folder, manifest.files, manifest.sha256) as arriving:
            for chunk in self.chunks(manifest, self._chunks, 0):
                arriving.add(chunk)
            arriving.complete()

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """Neighbouring chunks, as fast as both lines allow."""
        del manifest
        for chunk in wanted:
            for first in range(0, chunk.num_bytes, self._lines[0].piece_bytes):
                size = min(self._lines[0].piece_bytes, chunk.num_bytes - first)
                time.sleep(max(line.reserve(size) for line in self._lines))
            yield self._data[start : start + chunk.num_bytes]
            start += chunk.num_bytes


def manifest_of(data: bytes) -> WeightManifest:
    """One file."""
    sha256 = hashlib.sha256(data).hexdigest()
    return WeightManifest(
        run_id=RUN,
        version=1,
        kind=WeightKind.FULL,
        files=(WeightFile(name="model.safetensors", num_bytes=len(data), sha256=sha256),),
        num_bytes=len(data),
        sha256=sha256,
        uri="memory://bench",
        session="bench",
        checkpoint="bench",
        next_seq=0,
        created_ms=0,
    )


def broadcast(data: bytes, num_workers: int, bytes_per_s: float, *, is_star: bool) -> float:
    """Seconds until the last of the workers has all of it, verified."""
    manifest, chunks = manifest_of(data), read_chunk_list(list_chunks([data]), len(data))
    shared, addresses = Line(bytes_per_s), dict[str, str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        sources = {}
        for number in range(num_workers):
            name, own = f"w{number:02d}", Line(bytes_per_s)
            options = PeerOptions(
                worker_id=name, run_id=RUN, secret=SECRET, least_workers=_STAR if is_star else 2, down=own, up=Line(bytes_per_s)
            )
            source = PeerSource(
                Place(data, chunks, shared, own),
                options,
                neighbours=lambda name=name: {other: address for other, address in addresses.items() if other != name},  # type: ignore[misc]
                metrics=WorkerMetrics(CollectorRegistry()),
            )
            sources[name] = stack.enter_context(closing(source.start()))
            addresses[name] = source.address
        pool = stack.enter_context(ThreadPoolExecutor(num_workers))
        started_s = time.monotonic()
        list(pool.map(lambda name: sources[name].fetch(manifest, folder / name), sources))
        return time.monotonic() - started_s


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mb", type=float, default=64.0, help="size of the snapshot, in 10^6 bytes")
    parser.add_argument("--mbit", type=float, default=100.0, help="each line, in Mbit/s")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    data, bytes_per_s = np.random.default_rng(0).bytes(int(arguments.mb * 1e6)), arguments.mbit * _BYTES_PER_MBIT
    figures: dict[str, object] = {"mb": arguments.mb, "mbit": arguments.mbit, "limit_s": len(data) / bytes_per_s}
    for name in ("chain_s", "star_s"):
        times = {str(number): broadcast(data, number, bytes_per_s, is_star=name == "star_s") for number in arguments.workers}
        figures[name] = times
        sys.stdout.write(f"{name}: {', '.join(f'{number} workers {seconds:.2f}' for number, seconds in times.items())}\n")
    sys.stdout.write(f"limit_s: {figures['limit_s']:.2f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
