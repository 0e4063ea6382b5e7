"""A snapshot that no memory holds, from one worker to another: argv is an empty folder and the size in bytes. Prints figures as JSON.

The first worker has it as a sparse file, so that it takes the disk once; a few of its parts are not zeros, beyond 4 and 8 GiB too.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from prometheus_client import CollectorRegistry

from echo_bus.blobs.chunk_list import list_chunks, read_chunk_list
from echo_bus.blobs.files import read_span
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.peers.wire import PeerOptions
from echo_schemas.records import ChunkRef, WeightFile, WeightKind, WeightManifest

_PIECE = 8 << 20
_MARKED = 100_000
RUN, SECRET, FILE = "large", b"the secret of the run, 32 bytes.", "model.safetensors"


class SparsePlace:
    """The truth: the file and the list of its chunks."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self.marks = [each for each in (0, (1 << 32) - _MARKED // 2, 1 << 33, num_bytes - _MARKED) if each <= num_bytes - _MARKED]
        folder.mkdir()
        with (folder / FILE).open("wb") as file:
            file.truncate(num_bytes)
            for mark in self.marks:
                file.seek(mark)
                file.write(random.Random(mark).randbytes(_MARKED))
        whole = hashlib.sha256()
        chunk_list = list_chunks(self._pieces(num_bytes, whole))
        self._chunks = read_chunk_list(chunk_list, num_bytes)
        digest = whole.hexdigest()
        self.manifest = WeightManifest(
            run_id=RUN,
            version=1,
            kind=WeightKind.FULL,
            files=(WeightFile(name=FILE, num_bytes=num_bytes, sha256=digest),),
            num_bytes=num_bytes,
            sha256=digest,
            uri="memory://truth",
            session="s",
            checkpoint="c",
            next_seq=0,
            created_ms=0,
        )

    def _pieces(self, num_bytes: int, whole: hashlib._Hash) -> Iterator[bytes]:
        with (self.folder / FILE).open("rb") as file:
            for _ in range(0, num_bytes, _PIECE):
                piece = file.read(_PIECE)
                whole.update(piece)
                yield piece

    def chunk_refs(self, manifest: WeightManifest) -> tuple[ChunkRef, ...]:
        """All of them."""
        return self._chunks

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """Peers are there."""
        raise AssertionError

    def chunks(self, manifest: WeightManifest, wanted: Sequence[ChunkRef], start: int) -> Generator[bytes, None, None]:
        """Neighbouring chunks."""
        for chunk in wanted:
            yield read_span(self.folder, manifest.files, start, chunk.num_bytes)
            start += chunk.num_bytes


def main(folder: Path, num_bytes: int) -> None:
    place, addresses = SparsePlace(folder / "a", num_bytes), dict[str, str]()
    registries = {name: CollectorRegistry() for name in "ab"}
    sources = {
        name: PeerSource(
            place,
            PeerOptions(worker_id=name, run_id=RUN, secret=SECRET),
            neighbours=lambda name=name: {other: address for other, address in addresses.items() if other != name},  # type: ignore[misc]
            metrics=WorkerMetrics(registry),
        )
        for name, registry in registries.items()
    }
    with closing(sources["a"].start()), closing(sources["b"].start()):
        addresses.update({name: source.address for name, source in sources.items()})
        sources["a"].hold(place.manifest, place.folder)
        started_s = time.monotonic()
        sources["b"].fetch(place.manifest, folder / "b")
        seconds = time.monotonic() - started_s
    got = {way: registries["b"].get_sample_value("echo_rollout_peer_bytes_total", {"way": way}) or 0.0 for way in ("received", "truth")}
    spans = [read_span(folder / "b", place.manifest.files, mark, _MARKED) for mark in place.marks]
    figures = {
        **got,
        "chunks": len(place.chunk_refs(place.manifest)),
        "seconds": seconds,
        "is_same": spans == [random.Random(mark).randbytes(_MARKED) for mark in place.marks],
        "largest_memory": _largest_memory(),
    }
    sys.stdout.write(json.dumps(figures))


def _largest_memory() -> int:
    """Bytes that this process ever held; `getrusage` begins with what the process held that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
