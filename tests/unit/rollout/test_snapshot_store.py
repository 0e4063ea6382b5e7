"""Snapshots at an address instead of in the log: every file and the whole verified, nothing left behind by a fetch that failed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_bus.blobs.transfer import BlobReader
from echo_bus.bus import Bus
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_memory import MemoryCluster
from echo_rollout.weights.sources import PublishedSource
from echo_schemas.naming import Namespace
from echo_schemas.records import WeightFile, WeightKind, WeightManifest

pytest.importorskip("fsspec")

FILES = {"model.safetensors": bytes(range(256)) * 100, "config.json": b"{}"}


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def source_of(cluster: MemoryCluster, store: str) -> PublishedSource:
    bus = Bus(cluster=cluster, namespace=Namespace("test"), role="worker")
    reader: BlobReader = bus.blob_reader()
    return PublishedSource(reader, store)


@pytest.fixture
def source(cluster: MemoryCluster) -> PublishedSource:
    return source_of(cluster, "")


def placed(manifest: WeightManifest, sha256: str) -> WeightManifest:
    """The same files where a snapshot of this checksum would lie."""
    folder = folder_of(manifest)
    moved = folder.with_name(f"v{manifest.version}-{sha256[:12]}")
    folder.rename(moved)
    return replace(manifest, sha256=sha256, uri=moved.as_uri())


def folder_of(manifest: WeightManifest) -> Path:
    return Path((manifest.uri or "").removeprefix("file://"))


@pytest.fixture
def manifest(tmp_path: Path) -> WeightManifest:
    """A full snapshot where a learner without [store] uri puts it."""
    sha256 = sha256_of(b"".join(FILES.values()))
    store = tmp_path / "snapshots" / "demo" / f"v3-{sha256[:12]}"
    store.mkdir(parents=True)
    for name, content in FILES.items():
        (store / name).write_bytes(content)
    return WeightManifest(
        run_id="demo",
        version=3,
        kind=WeightKind.FULL,
        files=tuple(WeightFile(name=name, num_bytes=len(content), sha256=sha256_of(content)) for name, content in FILES.items()),
        num_bytes=sum(map(len, FILES.values())),
        sha256=sha256,
        uri=store.as_uri(),
        session="s",
        checkpoint="c",
        next_seq=0,
        created_ms=0,
    )


def test_the_files_of_an_address_arrive_whole(source: PublishedSource, manifest: WeightManifest, tmp_path: Path) -> None:
    source.fetch(manifest, tmp_path / "v3")
    assert {path.name: path.read_bytes() for path in (tmp_path / "v3").iterdir()} == FILES


def test_a_file_that_is_not_there_is_a_lost_snapshot(source: PublishedSource, manifest: WeightManifest, tmp_path: Path) -> None:
    (folder_of(manifest) / "config.json").unlink()
    with pytest.raises(OffsetLost, match=r"config\.json"):
        source.fetch(manifest, tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshots"]


def test_a_file_that_was_altered_is_named(source: PublishedSource, manifest: WeightManifest, tmp_path: Path) -> None:
    (folder_of(manifest) / "config.json").write_bytes(b"[]")
    with pytest.raises(BlobCorrupt, match=r"config\.json does not have the promised checksum"):
        source.fetch(manifest, tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshots"]


def test_files_that_are_right_but_make_another_snapshot_are_refused(
    source: PublishedSource, manifest: WeightManifest, tmp_path: Path
) -> None:
    with pytest.raises(BlobCorrupt, match="together"):
        source.fetch(placed(manifest, sha256="0" * 64), tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshots"]


@pytest.mark.parametrize(
    ("store", "uri"),
    [
        ("", "http://169.254.169.254/latest/meta-data"),
        ("", "file:///etc"),
        ("", "simplecache::{own}"),
        ("", "file:///tmp/../snapshots/demo/v3-{sha}"),
        ("memory://bucket/runs", "{own}"),
        ("memory://bucket/runs", "memory://bucket/others/demo/v3-{sha}"),
        ("memory://bucket/runs", "memory://bucket/runs/demo/../other/v3-{sha}"),
    ],
)
def test_no_record_makes_a_worker_open_another_address_than_the_stores(
    cluster: MemoryCluster, manifest: WeightManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, uri: str
) -> None:
    monkeypatch.setattr("echo_rollout.weights.store._remote_pieces", lambda *_: pytest.fail("something was opened"))
    asked = replace(manifest, uri=uri.format(own=manifest.uri, sha=manifest.sha256[:12]))
    with pytest.raises(TransportError, match="is not its place in") as refused:
        source_of(cluster, store).fetch(asked, tmp_path / "v3")
    assert "[store] uri" in (refused.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshots"]


def test_the_files_of_a_store_of_ones_own_arrive_whole(cluster: MemoryCluster, manifest: WeightManifest, tmp_path: Path) -> None:
    import fsspec

    place = f"/bucket/runs/demo/v3-{manifest.sha256[:12]}"
    files = fsspec.filesystem("memory")
    for name, content in FILES.items():
        files.pipe_file(f"{place}/{name}", content)
    source_of(cluster, "memory://bucket/runs").fetch(replace(manifest, uri=f"memory://{place}"), tmp_path / "v3")
    assert {path.name: path.read_bytes() for path in (tmp_path / "v3").iterdir()} == FILES


def test_a_store_of_an_unknown_kind_says_so(cluster: MemoryCluster, manifest: WeightManifest, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="no-such-store://"):
        source_of(cluster, "no-such-store://bucket").fetch(manifest, tmp_path / "v3")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshots"]


def test_a_store_that_fails_midway_is_gone_on_with(
    source: PublishedSource, manifest: WeightManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert sorted(path.name for path in tmp_path.iterdir()) == [".v3.partial", "snapshots"]
    source.fetch(manifest, tmp_path / "v3")
    assert {path.name: path.read_bytes() for path in (tmp_path / "v3").iterdir()} == FILES
    assert [place for place in read if place[0] == "model.safetensors"] == [("model.safetensors", at) for at in (0, 10_000, 20_000)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshots", "v3"]
