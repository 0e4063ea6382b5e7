"""Weights from peers: the plan is followed; whatever a peer does wrong, the snapshot arrives right and the peer is named."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from echo_bus.blobs.files import partial_of
from echo_bus.errors import BlobCorrupt, TransportError
from echo_rollout.weights.peers import client
from echo_rollout.weights.peers.client import Pace
from echo_rollout.weights.peers.wire import Kind, Request, ranges_of, send
from echo_schemas.errors import UserError
from tests.unit.rollout.peer_rig import CHUNK, SECRET, MemoryTruth, Rig, Serve, data_of, manifest_of, peer, rig
from tests.unit.rollout.swarm import wait_until

pytestmark = pytest.mark.slow

DATA = data_of(12)
MANIFEST = manifest_of(DATA)


@pytest.fixture
def truth() -> MemoryTruth:
    return MemoryTruth(DATA)


@pytest.fixture
def workers(tmp_path: Path, truth: MemoryTruth) -> Iterator[Rig]:
    with rig(tmp_path, truth) as made:
        yield made


def chunk(index: int) -> bytes:
    return DATA[index * CHUNK : (index + 1) * CHUNK]


def test_a_snapshot_leaves_the_truth_once_and_reaches_every_worker(tmp_path: Path) -> None:
    data = data_of(64)
    truth = MemoryTruth(data)
    with rig(tmp_path, truth) as workers:
        for name in "abcd":
            workers.add(name)
        got = workers.fetch_all(manifest_of(data))
    assert set(got.values()) == {data}
    assert Counter(truth.given) == dict.fromkeys(range(64), 1), "each chunk once"
    assert {name: workers.metric(name, "peer_bytes", way="truth") > 0 for name in "abcd"} == dict.fromkeys("abcd", True)
    received = sum(workers.metric(name, "peer_bytes", way="received") for name in "abcd")
    assert received == sum(workers.metric(name, "peer_bytes", way="sent") for name in "abcd") == 3 * len(data)


def test_a_chunk_is_passed_on_while_the_rest_still_comes(workers: Rig, truth: MemoryTruth) -> None:
    def slowly(data: bytes) -> bytes:
        if truth.given == [0, 1]:
            wait_until(lambda: workers.metric("b", "peer_bytes", way="received") == CHUNK, "chunk 0 to reach the second worker")
        return data

    truth.alter = slowly
    workers.add("a")
    workers.add("b")
    assert set(workers.fetch_all(MANIFEST).values()) == {DATA}


async def wrong_bytes(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for index in request.indices():
        await send(writer, Kind.CHUNK, index, chunk(index) if index < 3 else chunk(index)[::-1])


async def another_chunk(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, Kind.CHUNK, 1, chunk(1))


async def too_long(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, Kind.CHUNK, 0, b"x" * 2_000_000)


async def half_bytes(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, Kind.CHUNK, 0, chunk(0))
    writer.write(b"\x01\x00\x00\x00\x01\x00\x00\x03\xe8" + chunk(1)[:500])
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def nothing(_request: Request, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def only_waits(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await send(writer, Kind.WAITING)
        await asyncio.sleep(0.01)


async def has_it_no_more(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, Kind.GONE)
    writer.close()
    await writer.wait_closed()


async def no_frame(_request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400")
    await writer.drain()
    await reader.read()


async def trickles(_request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x01\x00\x00\x00\x00\x00\x00\x03\xe8" + chunk(0)[:10])
    await writer.drain()
    await reader.read()


@pytest.mark.parametrize(
    ("serve", "why", "is_named", "is_asked_again"),
    [
        (wrong_bytes, "wrong", "the bytes of its chunk 3 are wrong", False),
        (another_chunk, "wrong", "it sent 1000 bytes as chunk 1 where chunk 0 has 1000", False),
        (too_long, "wrong", "it sent 2000000 bytes as chunk 0 where chunk 0 has 1000", False),
        (no_frame, "wrong", "it sent a frame of the unknown kind 72", False),
        (half_bytes, "broke_off", "it broke off", True),
        (nothing, "slow", "it said nothing for 0.05 s", True),
        (trickles, "slow", "a chunk did not come within 0.1 s", True),
        (only_waits, "waited", "it waits for chunk 0 itself, for more than 0.1 s", True),
        (has_it_no_more, "gone", "it does not have that snapshot", True),
    ],
)
def test_a_peer_that_does_it_wrongly_is_left_out_and_named_and_the_snapshot_arrives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    serve: Serve,
    why: str,
    is_named: str,
    is_asked_again: bool,
) -> None:
    caplog.set_level(logging.INFO)
    second = data_of(12, version=2)
    truth = MemoryTruth(DATA, second)
    with rig(tmp_path, truth) as workers, peer(serve) as (address, asked):
        workers.addresses["a"] = address
        workers.add("b")
        if why == "slow":
            monkeypatch.setattr(client, "_SILENT_S", 0.05)
            monkeypatch.setattr(Pace, "_UNKNOWN_S", 0.1)
        monkeypatch.setattr(Pace, "_WAIT_LEAST_S", 0.1)
        monkeypatch.setattr(Pace, "_WAIT_HOP_S", 0.0)
        assert workers.fetch("b", MANIFEST) == DATA
        assert workers.metric("b", "peers_left_out", why=why) == 1
        assert is_named in caplog.text
        assert "Worker a" in caplog.text
        num_asked = len(asked)
        assert workers.fetch("b", manifest_of(second, version=2)) == second
        assert (len(asked) > num_asked) is is_asked_again
    kept = {"wrong_bytes": 3, "half_bytes": 1}.get(serve.__name__, 0)
    assert truth.given[: 12 - kept] == list(range(kept, 12)), "what the peer gave rightly is not read again"


def test_a_peer_that_is_not_there_any_more_is_left_out(workers: Rig, truth: MemoryTruth) -> None:
    async def unused(*_arguments: object) -> None:
        """Nobody comes."""

    with peer(unused) as (address, _):
        workers.addresses["a"] = address
    workers.add("b")
    assert workers.fetch("b", MANIFEST) == DATA
    assert workers.metric("b", "peers_left_out", why="unreachable") == 1
    assert len(truth.given) == 12


def test_an_address_that_is_none_is_left_out(workers: Rig) -> None:
    workers.addresses["a"] = "nowhere"
    workers.add("b")
    assert workers.fetch("b", MANIFEST) == DATA
    assert workers.metric("b", "peers_left_out", why="unreachable") == 1


def test_a_worker_of_another_run_is_not_served_and_serves_nobody(workers: Rig, caplog: pytest.LogCaptureFixture) -> None:
    workers.add("a", secret=b"another run's secret, 32 bytes.")
    workers.add("b")
    assert workers.fetch("b", MANIFEST) == DATA
    assert workers.metric("b", "peers_left_out", why="refused") == 1
    assert "is not served: it does not know the secret of this run" in caplog.text


def test_a_server_that_does_not_know_the_secret_is_found_out(workers: Rig) -> None:
    """One that serves whoever asks, and cannot prove the secret."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"echoswarm peer 1" + bytes(32))
        await reader.readexactly(4)
        writer.write(bytes(32))
        await writer.drain()
        await reader.readexactly(1_000_000)

    source = workers.add("b")
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(handle, "127.0.0.1", 0), source._loop).result(10)
    workers.addresses["a"] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert workers.fetch("b", MANIFEST) == DATA
    assert workers.metric("b", "peers_left_out", why="refused") == 1
    source._loop.call_soon_threadsafe(server.close)


def test_chunks_of_another_run_are_not_served_even_to_one_that_knows_the_secret(workers: Rig) -> None:
    workers.add("a", run_id="other")
    workers.add("b")
    assert set(workers.fetch_all(MANIFEST).values()) == {DATA}
    assert workers.metric("a", "peer_bytes", way="sent") == 0
    assert workers.metric("b", "peers_left_out", why="gone") == 1


def test_a_stripe_goes_on_from_the_worker_before_the_one_that_died(workers: Rig, truth: MemoryTruth) -> None:
    async def dies_midway(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for index in list(request.indices())[:5]:
            await send(writer, Kind.CHUNK, index, chunk(index))
        writer.close()
        await writer.wait_closed()

    workers.add("a")
    workers.add("c")
    with peer(dies_midway) as (address, asked):
        workers.addresses["b"] = address
        assert set(workers.fetch_all(MANIFEST).values()) == {DATA}
    assert truth.given == list(range(12)), "the rest came from a, which had it"
    assert [request.ranges for request in asked] == [((0, 12),)]
    assert workers.metric("c", "peers_left_out", why="broke_off") == 1


def test_a_late_joiner_gets_from_the_others_what_they_have(tmp_path: Path) -> None:
    data = data_of(48)
    truth = MemoryTruth(data)
    with rig(tmp_path, truth) as workers:
        workers.add("a")
        workers.add("b")
        workers.fetch_all(manifest_of(data))
        del truth.given[:]
        workers.add("c")
        assert workers.fetch("c", manifest_of(data)) == data
        assert truth.given == list(range(32, 48)), "the one stripe of which c is the first"


def test_what_the_truth_has_lost_comes_from_workers_that_have_it(workers: Rig, truth: MemoryTruth) -> None:
    workers.add("b")
    workers.add("c")
    workers.fetch_all(MANIFEST)
    truth.fails_after = 2
    workers.add("a")
    assert workers.fetch("a", MANIFEST) == DATA, "the first of the chain, and the others are behind it"
    assert workers.metric("a", "peer_bytes", way="received") == len(DATA) - 2 * CHUNK


def test_what_was_interrupted_goes_on_where_it_was_even_with_an_altered_file(workers: Rig, truth: MemoryTruth, tmp_path: Path) -> None:
    workers.add("a")
    workers.addresses["b"] = "127.0.0.1:9"
    truth.fails_after = 7
    with pytest.raises(TransportError, match="the truth is away"):
        workers.fetch("a", MANIFEST)
    file = partial_of(tmp_path / "a" / "v1") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2500] + b"x" + file.read_bytes()[2501:])
    truth.fails_after = None
    del truth.given[:]
    assert workers.fetch("a", MANIFEST) == DATA
    assert truth.given == [2, *range(7, 12)], "chunk 2 is not what it was"


def test_wrong_bytes_of_the_truth_are_not_installed_and_not_served(workers: Rig, truth: MemoryTruth, tmp_path: Path) -> None:
    truth.alter = lambda data: data[::-1]
    workers.add("a")
    workers.add("b")
    with pytest.raises(BlobCorrupt, match="Chunk 0 of v1 does not have the promised checksum"):
        workers.fetch("a", MANIFEST)
    assert not list((tmp_path / "a").iterdir())
    truth.alter = bytes
    assert workers.fetch("b", MANIFEST) == DATA


def test_few_workers_and_small_snapshots_come_from_the_truth(workers: Rig, truth: MemoryTruth) -> None:
    for name, options in {"a": {"least_workers": 3}, "b": {"least_bytes": len(DATA) + 1}}.items():
        workers.add(name, **options)
    for name in "ab":
        workers.sources[name].fetch(MANIFEST, workers.folder / f"{name}-v1")
    assert (truth.whole, truth.given) == (2, [])


def test_a_fetch_ends_with_its_source(workers: Rig) -> None:
    begun = threading.Event()

    async def waits(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        while True:
            await send(writer, Kind.WAITING)
            await asyncio.sleep(0.01)

    with peer(waits) as (address, _):
        workers.addresses["a"] = address
        source, ended = workers.add("b"), []

        def fetch() -> None:
            try:
                workers.fetch("b", MANIFEST)
            except BaseException as exc:  # what it is, is looked at below
                ended.append(type(exc).__name__)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert begun.wait(30)
        source.close()
        thread.join(30)
    assert ended == ["CancelledError"]


def test_a_port_that_is_taken_is_said(workers: Rig) -> None:
    first = workers.add("a")
    with pytest.raises(UserError, match=r"No peer can be served at 127\.0\.0\.1") as refused, closing(first):
        workers.add("b", port=int(first.address.rpartition(":")[2]))
    assert "[weights] host or port" in (refused.value.hint or "")


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n" + bytes(100)])
def test_who_does_not_speak_as_a_peer_is_hung_up_on(workers: Rig, said: bytes) -> None:
    source = workers.add("a")

    async def knock() -> bytes:
        host, _, port = source.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        answer = await reader.read()
        writer.transport.abort()
        return answer

    answer = asyncio.run(asyncio.wait_for(knock(), 30))
    assert len(answer) == 48, "magic and challenge, and nothing else"
    assert SECRET not in answer


def test_ranges_say_what_indices_do() -> None:
    assert ranges_of([1, 2, 3, 7, 8]) == ((1, 4), (7, 9))
    assert list(Request("run", "sha", ((1, 4), (7, 9))).indices()) == [1, 2, 3, 7, 8]
