"""Snapshots made of the one before: whatever is missing or wrong, the whole is fetched instead."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from echo_bus.blobs.delta import diff
from echo_bus.blobs.files import partial_of
from echo_bus.errors import TransportError
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.deltas import DeltaSource
from echo_rollout.weights.sources import PublishedSource
from echo_schemas.records import WeightManifest
from echo_schemas.topics import WEIGHT_CHUNKS
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, Swarm, wait_until


class Versions:
    """Versions 0 to 3 in the log, each with what changed; a source, and what it fetched whole."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        self.data = [np.random.default_rng(0).bytes(20_000)]
        for version in range(1, 4):
            self.data.append(self.data[-1][: 1000 * version] + bytes(10) + self.data[-1][1000 * version + 10 :])
        self.manifests = [publish(swarm, version, self.data) for version in range(4)]
        self.folder = folder
        self.whole: list[int] = []
        self.built: list[int] = []
        self.registry = CollectorRegistry()
        self._published = PublishedSource(swarm.bus.blob_reader())
        self.source = DeltaSource(
            self,
            swarm.bus.blob_reader(),
            manifest_of=lambda version: self.manifests[version],
            on_built=lambda manifest, _: self.built.append(manifest.version),
            metrics=WorkerMetrics(self.registry),
        )

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """As the source of whole snapshots."""
        self.whole.append(manifest.version)
        self._published.fetch(manifest, folder)

    def get(self, version: int) -> None:
        """By the source; the bytes are right."""
        folder = self.folder / f"v{version}"
        self.source.fetch(self.manifests[version], folder)
        assert (folder / "adapter_model.safetensors").read_bytes() == self.data[version]


def publish(swarm: Swarm, version: int, data: list[bytes]) -> WeightManifest:
    if not version:
        return swarm.publish_version(version, content=data[version])
    made = diff([data[version - 1]], [data[version]], most_bytes=10_000)
    assert made is not None
    ref = swarm.bus.blob_writer(swarm.publisher).write(WEIGHT_CHUNKS, RUN, f"v/{version}/delta", made)
    parent_sha256 = hashlib.sha256(data[version - 1]).hexdigest()
    return swarm.publish_version(version, content=data[version], delta=ref, parent_sha256=parent_sha256)


@pytest.fixture
def versions(make_swarm: MakeSwarm, tmp_path: Path) -> Versions:
    return Versions(make_swarm(), tmp_path / "snapshots")


def test_each_version_is_made_of_the_one_before(versions: Versions) -> None:
    for version in range(4):
        versions.get(version)
    assert (versions.whole, versions.built) == ([0], [1, 2, 3])
    assert 0 < (versions.registry.get_sample_value("echo_rollout_delta_bytes_total") or 0) < 1000


def test_who_missed_versions_folds_their_deltas(versions: Versions) -> None:
    versions.get(0)
    versions.get(3)
    assert (versions.whole, versions.built) == ([0], [3])


def no_delta(versions: Versions) -> None:
    versions.manifests[2] = replace(versions.manifests[2], delta=None)


def another_parent(versions: Versions) -> None:
    versions.manifests[2] = replace(versions.manifests[2], parent_sha256="0" * 64)


def a_parent_that_is_not_known(versions: Versions) -> None:
    versions.manifests[1] = replace(versions.manifests[1], sha256="0" * 64)


def a_long_way(versions: Versions) -> None:
    ref = versions.manifests[2].delta
    assert ref is not None
    versions.manifests[2] = replace(versions.manifests[2], delta=replace(ref, num_bytes=15_000))


def a_delta_of_something_else(versions: Versions) -> None:
    versions.manifests[2] = replace(versions.manifests[2], delta=versions.manifests[1].delta)


def a_delta_that_is_lost(versions: Versions) -> None:
    ref = versions.manifests[2].delta
    assert ref is not None
    versions.manifests[2] = replace(versions.manifests[2], delta=replace(ref, blob="v/9/none"))


def no_base(versions: Versions) -> None:
    shutil.rmtree(versions.folder / "v0")


def an_altered_base(versions: Versions) -> None:
    (versions.folder / "v0" / "adapter_model.safetensors").write_bytes(bytes(20_000))


def a_shorter_base(versions: Versions) -> None:
    (versions.folder / "v0" / "adapter_model.safetensors").write_bytes(bytes(10))


def an_interrupted_transfer(versions: Versions) -> None:
    partial_of(versions.folder / "v2").mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        no_delta,
        another_parent,
        a_parent_that_is_not_known,
        a_long_way,
        a_delta_of_something_else,
        a_delta_that_is_lost,
        no_base,
        an_altered_base,
        a_shorter_base,
        an_interrupted_transfer,
    ],
)
def test_where_no_delta_leads_there_the_whole_is_fetched(versions: Versions, spoil: Callable[[Versions], None]) -> None:
    versions.get(0)
    spoil(versions)
    versions.get(2)
    assert (versions.whole, versions.built) == ([0, 2], [])
    assert sorted(path.name for path in versions.folder.iterdir() if path.name != "v0") == ["v2"]


def test_a_snapshot_that_cannot_be_passed_on_is_installed_all_the_same(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_manifest: WeightManifest, _folder: Path) -> None:
        raise TransportError("the list of chunks cannot be read")

    monkeypatch.setattr(versions.source, "_on_built", away)
    versions.get(0)
    versions.get(1)
    assert versions.whole == [0]


def test_a_worker_makes_versions_of_deltas_and_passes_them_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(weights={"source": "peers", "secret": "s" * 32})
    data = [bytes(20_000), bytes(10) + b"x" * 10 + bytes(19_980)]
    publish(swarm, 0, data)
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="installed") == 1, "version 0")
    publish(swarm, 1, data)
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="installed") == 2, "version 1")
    assert swarm.metric("echo_rollout_peer_bytes_total", way="truth") == 20_000, "version 0 alone"
    assert swarm.metric("echo_rollout_delta_bytes_total") > 0
