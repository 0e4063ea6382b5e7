"""Snapshots at an address instead of in the log: every file and the whole verified, nothing left behind by a fetch that failed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_bus.blobs import BlobReader
from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_bus.memory import MemoryCluster
from echo_bus.metrics import BusMetrics
from echo_rollout.weights import LogSource
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import WeightFile, WeightKind, WeightManifest

pytest.importorskip("fsspec")

FILES = {"model.safetensors": bytes(range(256)) * 100, "config.json": b"{}"}


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def source(cluster: MemoryCluster) -> LogSource:
    bus = Bus(
        cluster=cluster, namespace=Namespace("test"), codec=lock_file_codec(), metrics=BusMetrics(), clock=SystemClock(), role="worker"
    )
    reader: BlobReader = bus.blob_reader()
    return LogSource(reader)


@pytest.fixture
def manifest(tmp_path: Path) -> WeightManifest:
    """A full snapshot in a folder."""
    store = tmp_path / "store"
    store.mkdir()
    for name, content in FILES.items():
        (store / name).write_bytes(content)
    return WeightManifest(
        run_id="demo",
        version=3,
        kind=WeightKind.FULL,
        files=tuple(WeightFile(name=name, num_bytes=len(content), sha256=sha256_of(content)) for name, content in FILES.items()),
        num_bytes=sum(map(len, FILES.values())),
        sha256=sha256_of(b"".join(FILES.values())),
        uri=f"file://{store}",
        session="s",
        checkpoint="c",
        next_seq=0,
        created_ms=0,
    )


def test_the_files_of_an_address_arrive_whole(source: LogSource, manifest: WeightManifest, tmp_path: Path) -> None:
    source.fetch(manifest, tmp_path / "v3")
    assert {path.name: path.read_bytes() for path in (tmp_path / "v3").iterdir()} == FILES


def test_a_file_that_is_not_there_is_a_lost_snapshot(source: LogSource, manifest: WeightManifest, tmp_path: Path) -> None:
    (tmp_path / "store" / "config.json").unlink()
    with pytest.raises(OffsetLost, match=r"config\.json"):
        source.fetch(manifest, tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_file_that_was_altered_is_named(source: LogSource, manifest: WeightManifest, tmp_path: Path) -> None:
    (tmp_path / "store" / "config.json").write_bytes(b"[]")
    with pytest.raises(BlobCorrupt, match=r"config\.json does not have the promised checksum"):
        source.fetch(manifest, tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_files_that_are_right_but_make_another_snapshot_are_refused(source: LogSource, manifest: WeightManifest, tmp_path: Path) -> None:
    with pytest.raises(BlobCorrupt, match="together"):
        source.fetch(replace(manifest, sha256="0" * 64), tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_address_of_an_unknown_kind_says_so(source: LogSource, manifest: WeightManifest, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="no-such-store://"):
        source.fetch(replace(manifest, uri="no-such-store://bucket/v3"), tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_that_fails_midway_is_gone_on_with(
    source: LogSource, manifest: WeightManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    class NoNetwork(Exception):
        """What the library below a driver raises; none of ours, and none of Python's own."""

    read: list[tuple[str, int]] = []
    opened = LocalFileSystem._open

    def breaking(files: LocalFileSystem, path: str, **options: Any) -> Any:
        remote = opened(files, path, **options)
        read_some = remote.read

        def read_once(size: int) -> bytes:
            if len(read) == 1:
                read.append(("", 0))
                raise NoNetwork("the line is dead")
            read.append((Path(path).name, remote.tell()))
            return bytes(read_some(min(size, 10_000)))

        remote.read = read_once
        return remote

    monkeypatch.setattr(LocalFileSystem, "_open", breaking)
    with pytest.raises(TransportError, match="the line is dead"):
        source.fetch(manifest, tmp_path / "v3")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".v3.partial", "store"]
    source.fetch(manifest, tmp_path / "v3")
    assert {path.name: path.read_bytes() for path in (tmp_path / "v3").iterdir()} == FILES
    assert [place for place in read if place[0] == "model.safetensors"] == [("model.safetensors", at) for at in (0, 10_000, 20_000)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "v3"]
