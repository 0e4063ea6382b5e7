"""The transfer parts of several workers on a real Kafka: addresses from heartbeats, chunks from the log; one lies, and one dies."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from echo_bus.blobs.transfer import CHUNK_BYTES
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import SystemClock
from echo_rollout.heartbeat import GenerationTime, WorkerHeartbeat, first_status
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.opening import open_peers
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.peers.wire import Kind, Request, send
from echo_rollout.weights.sources import PublishedSource
from echo_runtime.places import PlaceTimes
from echo_schemas.records import WeightManifest, WorkerState
from echo_settings import Settings
from tests.integration.rollout.conftest import Fleet, await_in
from tests.unit.rollout.peer_rig import SECRET, peer
from tests.unit.rollout.swarm import RUN, wait_until

pytestmark = pytest.mark.kafka

NUM_CHUNKS = 12


class DyingLine(Line):
    """Lets `num_bytes` pass, then calls `die` on a thread and lets nothing more pass."""

    def __init__(self, num_bytes: int, die: Callable[[], None]) -> None:
        super().__init__()
        self.piece_bytes = 64 << 10
        self._left = num_bytes
        self._death = threading.Thread(target=die)

    def reserve(self, num_bytes: int) -> float:
        self._left -= num_bytes
        if self._left >= 0:
            return 0.0
        if self._death.ident is None:
            self._death.start()
        return 3600.0


class Part:
    """What of a worker concerns weights: its heartbeat, its peers, its reader of blobs."""

    def __init__(self, bus: Bus, folder: Path, name: str, stack: ExitStack, *, address: str = "") -> None:
        """`address`: said in place of its own."""
        self.name = name
        self._folder = folder / name
        self._registry, clock = CollectorRegistry(), SystemClock()
        settings = Settings.model_validate(
            {
                "run": {"name": RUN},
                "rollout": {"heartbeat_s": 0.2},
                "weights": {"source": "peers", "secret": SECRET.decode()},
            }
        )
        status = first_status(run_id=RUN, worker_id=name, engine="scripted", price_per_hour=0.0)
        publisher = stack.enter_context(closing(bus.publisher(profiles.PRODUCER_LATENCY)))
        generation = GenerationTime(PlaceTimes(self._registry, clock), clock)
        heartbeat = stack.enter_context(closing(WorkerHeartbeat(publisher, status, generation, clock, every_s=0.2)))
        reader = stack.enter_context(closing(bus.blob_reader()))
        opened = open_peers(
            settings, bus, PublishedSource(reader), stack, worker_id=name, metrics=WorkerMetrics(self._registry), clock=clock
        )
        assert opened is not None
        self.peers: PeerSource = opened
        heartbeat.start()
        heartbeat.change(state=WorkerState.READY, peer_address=address or opened.address)

    def fetch(self, manifest: WeightManifest) -> bytes:
        self.peers.fetch(manifest, self._folder / f"v{manifest.version}")
        return (self._folder / f"v{manifest.version}" / manifest.files[0].name).read_bytes()

    def metric(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"echo_rollout_{name}_total", labels) or 0.0


@pytest.fixture
def add(fleet: Fleet, tmp_path: Path) -> Iterator[Callable[..., Part]]:
    with ExitStack() as stack:
        yield lambda name, **options: Part(fleet.bus, tmp_path, name, stack, **options)


def test_a_snapshot_reaches_every_worker_although_one_lies_and_one_dies(
    fleet: Fleet, add: Callable[..., Part], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = os.urandom(NUM_CHUNKS * CHUNK_BYTES - 100)

    async def lies(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for index in request.indices():
            await send(writer, Kind.CHUNK, index, bytes(min(CHUNK_BYTES, len(data) - index * CHUNK_BYTES)))

    with peer(lies) as (address, _):
        first, _liar, third = add("a"), add("b", address=address), add("c")
        dying, fifth = add("d"), add("e")
        object.__setattr__(dying.peers._options, "up", DyingLine(5 * CHUNK_BYTES // 2, dying.peers.close))
        parts = (first, third, dying, fifth)
        wait_until(lambda: all(len(part.peers._neighbours()) == 4 for part in parts), "everybody to know the others")
        manifest = fleet.publish_version(1, content=data)
        with ThreadPoolExecutor(len(parts)) as pool:
            fetches = {part.name: pool.submit(part.fetch, manifest) for part in parts}
            got = {name: fetches[name].result(60) for name in "ace"}
    assert set(got.values()) == {data}
    assert first.metric("peer_bytes", way="truth") == len(data), "one chain, of which a is the first"
    assert (third.metric("peer_bytes", way="truth"), fifth.metric("peer_bytes", way="truth")) == (0, 0)
    assert third.metric("peers_left_out", why="wrong") == 1
    assert fifth.metric("peers_left_out", why="broke_off") == 1
    assert "Worker b (" in caplog.text, "the liar is named"
    assert "Worker d (" in caplog.text
    late = add("f")
    wait_until(lambda: "e" in late.peers._neighbours(), "the late one to know the others")
    assert late.fetch(manifest) == data
    assert late.metric("peer_bytes", way="truth") == 0


def test_workers_as_processes_say_where_they_serve_and_install_what_they_pass_on(fleet: Fleet) -> None:
    for name in ("w0", "w1"):
        fleet.launch("worker", name, weights={"source": "peers", "secret": SECRET.decode()})
    await_in(fleet, lambda: len({said.worker_id for said in fleet.statuses() if said.peer_address}) == 2, "both to say where they serve")
    fleet.publish_version(1, content=os.urandom(3 * CHUNK_BYTES))
    await_in(fleet, lambda: {said.worker_id for said in fleet.statuses() if said.installed_version == 1} == {"w0", "w1"}, "version 1")
    assert all(SECRET.decode() not in fleet.log(name) for name in ("w0", "w1"))
