"""The time of sending a snapshot to all workers: in striped chains from worker to worker, and straight from its place; savings of a delta.

    python bench/broadcast.py [--mb 64] [--mbit 100] [--workers 2 4 8] [--lines tc|buckets] [--json FILE]

Uses the workers' own transfer: sockets, checksums, files in shared memory. Each worker has a line of --mbit in each direction, and so has
the snapshot's place: a learner with no better line than a worker's. With `tc` each has its own network namespace behind a line whose rate
the kernel limits; that needs root. With `buckets`, the default elsewhere, all use the loopback, and token buckets in the transfer limit the
rate. `limit_s` is size / line. The time is that of the last worker. Needs no Kafka.

`delta_ratio`: bytes of a delta / bytes of the snapshot, after one step of AdamW at 1e-6 on float32 weights (8.4 million in each of
--layers, drawn with 0.02, gradients of a real loss), as snapshots in bfloat16 and in float32. `delta_apply_s`: to make the bfloat16
snapshot (67 MB) from the previous one, verified and written; `delta_make_s`: to make its delta.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from command import parser_of, save
from namespaces import ByteServer, Machines, read_bytes, why_not
from payload import make_manifest
from prometheus_client import CollectorRegistry

from echo_bus.blobs.chunk_list import list_chunks, read_chunk_list
from echo_bus.blobs.delta import diff, patch
from echo_bus.blobs.files import ArrivingFiles
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.peers.wire import PeerOptions
from echo_schemas.records import ChunkRef, WeightKind, WeightManifest

RUN, SECRET = "broadcast", b"a secret that is no secret at all"
_BYTES_PER_MBIT = 125_000
_STAR = 1 << 20  # with fewer workers than these each takes the snapshot from its place


class Place:
    """The place of the snapshot, as one worker reaches it: over a line that all workers share, and its own line."""

    def __init__(self, data: bytes, chunks: tuple[ChunkRef, ...], shared: Line, own: Line) -> None:
        self._data = data
        self._chunks = chunks
        self._lines = (shared, own)

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """All chunks."""
        del manifest
        return self._chunks

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """Fetch all chunks, in order."""
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


class FarPlace(Place):
    """The same on another machine."""

    def __init__(self, address: tuple[str, int], chunks: tuple[ChunkRef, ...]) -> None:
        super().__init__(b"", chunks, Line(), Line())
        self._address = address

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """Neighbouring chunks, as fast as they come."""
        sizes = iter([chunk.num_bytes for chunk in wanted])
        size, gathered = next(sizes), bytearray()
        for piece in read_bytes(self._address, start, start + sum(chunk.num_bytes for chunk in wanted)):
            gathered += piece
            while size and len(gathered) >= size:
                yield bytes(gathered[:size])
                del gathered[:size]
                size = next(sizes, 0)


def manifest_of(data: bytes) -> WeightManifest:
    """The manifest of a snapshot of one file."""
    return make_manifest(1, {"model.safetensors": data}, run_id=RUN, kind=WeightKind.FULL, uri="memory://bench")


def broadcast(data: bytes, num_workers: int, mbit: float, *, is_star: bool, by_kernel: bool) -> float:
    """Seconds until the last worker has the whole snapshot, verified."""
    manifest, chunks = manifest_of(data), read_chunk_list(list_chunks([data]), len(data))
    bytes_per_s = math.inf if by_kernel else mbit * _BYTES_PER_MBIT
    shared, addresses = Line(bytes_per_s), dict[str, str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        machines, far = None, None
        if by_kernel:
            machines = stack.enter_context(Machines(num_workers + 1, mbit))
            with machines.inside(num_workers):
                server = stack.enter_context(closing(ByteServer(data, machines.addresses[num_workers])))
            far = FarPlace((machines.addresses[num_workers], server.server_address[1]), chunks)
        sources = []
        for number in range(num_workers):
            name, own = f"w{number:02d}", Line(bytes_per_s)
            host = machines.addresses[number] if machines else "127.0.0.1"
            options = PeerOptions(
                worker_id=name,
                run_id=RUN,
                secret=SECRET,
                host=host,
                advertise=host,
                least_workers=_STAR if is_star else 2,
                down=own,
                up=Line(bytes_per_s),
            )
            source = PeerSource(
                far or Place(data, chunks, shared, own),
                options,
                neighbours=lambda name=name: {other: address for other, address in addresses.items() if other != name},  # type: ignore[misc]
                metrics=WorkerMetrics(CollectorRegistry()),
            )
            with machines.inside(number) if machines else nullcontext():
                sources.append(stack.enter_context(closing(source.start())))
            addresses[name] = source.address

        def fetch(number: int) -> None:
            with machines.inside(number) if machines else nullcontext():
                sources[number].fetch(manifest, folder / str(number))

        pool = stack.enter_context(ThreadPoolExecutor(num_workers))
        started_s = time.monotonic()
        list(pool.map(fetch, range(num_workers)))
        return time.monotonic() - started_s


def snapshots_of_a_step(num_layers: int) -> dict[str, tuple[bytes, bytes]]:
    """By type of number, the weights before and after one optimizer step that follows three others."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(*shape, bias=False) for _ in range(num_layers) for shape in ((1024, 4096), (4096, 1024))]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=0.02)
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    taken: list[dict[str, bytes]] = []
    for step in range(4):
        if step == 3:
            taken.append(_as_bytes(model))
        optimizer.zero_grad()
        inputs, targets = torch.randn(64, 1024), torch.randn(64, 1024)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    taken.append(_as_bytes(model))
    return {name: (taken[0][name], taken[1][name]) for name in taken[0]}


def _as_bytes(model: Any) -> dict[str, bytes]:
    import torch

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    types = {"bfloat16": weights.to(torch.bfloat16).view(torch.int16), "float32": weights.view(torch.int32)}
    return {name: numbers.numpy().tobytes() for name, numbers in types.items()}


def measure_deltas(num_layers: int) -> dict[str, object]:
    """Ratios by type of number, and seconds for bfloat16."""
    figures: dict[str, object] = {}
    ratios: dict[str, float] = {}
    for name, (old, new) in snapshots_of_a_step(num_layers).items():
        started_s = time.monotonic()
        delta = diff([old], [new], most_bytes=2 * len(new)) or b""
        made_s = time.monotonic()
        ratios[name] = len(delta) / len(new)
        if name == "bfloat16":
            figures |= {"delta_make_s": made_s - started_s, "delta_apply_s": _apply_s(old, new, delta)}
    return {"delta_ratio": ratios, **figures}


def _apply_s(old: bytes, new: bytes, delta: bytes) -> float:
    manifest = manifest_of(new)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        started_s = time.monotonic()
        with ArrivingFiles(Path(folder) / "v1", manifest.files, manifest.sha256) as arriving:
            for piece in patch([old], delta):
                arriving.add(piece)
            arriving.complete()
        return time.monotonic() - started_s


def main() -> int:
    """Run and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--mb", type=float, default=64.0, help="size of the snapshot, in 10^6 bytes")
    parser.add_argument("--mbit", type=float, default=100.0, help="each line, in Mbit/s")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lines", choices=["tc", "buckets"], help="limit the rates by the kernel (tc, where possible) or by the transfer")
    parser.add_argument("--layers", type=int, default=4, help="of the model whose deltas are measured")
    arguments = parser.parse_args()
    lines = arguments.lines or ("buckets" if why_not() else "tc")
    if lines == "tc" and why_not():
        parser.error(f"this machine cannot have network namespaces: {why_not()}. Leave --lines out for token buckets.")
    data, limit_s = np.random.default_rng(0).bytes(int(arguments.mb * 1e6)), arguments.mb * 1e6 / (arguments.mbit * _BYTES_PER_MBIT)
    figures: dict[str, object] = {"mb": arguments.mb, "mbit": arguments.mbit, "lines": lines, "limit_s": limit_s}
    for name in ("chain_s", "star_s"):
        times = {
            str(number): broadcast(data, number, arguments.mbit, is_star=name == "star_s", by_kernel=lines == "tc")
            for number in arguments.workers
        }
        figures[name] = times
        sys.stdout.write(f"{name}: {', '.join(f'{number} workers {seconds:.2f}' for number, seconds in times.items())}\n")
    sys.stdout.write(f"limit_s: {limit_s:.2f} ({lines})\n")
    deltas = measure_deltas(arguments.layers)
    sys.stdout.write("".join(f"{name}: {value}\n" for name, value in deltas.items()))
    figures |= deltas
    save(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
