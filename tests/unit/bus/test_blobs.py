"""Blobs of any size at any speed: a transfer ends when nothing more comes, and the next attempt goes on where it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.blobs import transfer as blobs
from echo_bus.blobs.files import partial_of
from echo_bus.blobs.transfer import BlobReader, BlobWriter
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawConsumer, RawMessage
from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.clock import Clock, ManualClock
from echo_bus.errors import BlobCorrupt, DeadlineExceeded
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.records import BlobRef, Coordinates, WeightFile, WeightManifest
from echo_schemas.topics import WEIGHT_CHUNKS, WEIGHTS
from tests.examples import load_examples

RUN = "demo"
CHUNK = 100
DATA = bytes(range(250)) * 4
FILES = [
    WeightFile(name="model.safetensors", num_bytes=730, sha256=hashlib.sha256(DATA[:730]).hexdigest()),
    WeightFile(name="empty", num_bytes=0, sha256=hashlib.sha256(b"").hexdigest()),
    WeightFile(name="config.json", num_bytes=270, sha256=hashlib.sha256(DATA[730:]).hexdigest()),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def bus() -> Bus:
    cluster = MemoryCluster()
    cluster.admin().create_topics([NewTopic(f"test.{WEIGHT_CHUNKS.name}", 1, 1)])[f"test.{WEIGHT_CHUNKS.name}"].result()
    return Bus(cluster=cluster, namespace=Namespace("test"), role="worker")


def written(bus: Bus, data: bytes = DATA) -> BlobRef:
    with closing(bus.publisher(profiles.PRODUCER_BLOBS)) as publisher:
        return bus.blob_writer(publisher).write(WEIGHT_CHUNKS, RUN, "v/1/abc", data)


class Network:
    """A consumer whose messages come as `arrives` lets them: it is called before each with their number so far, None is silence."""

    def __init__(self, consumer: RawConsumer, arrives: Callable[[int], bool]) -> None:
        self._consumer, self._arrives, self._number = consumer, arrives, 0
        self.offsets: list[int] = []

    def poll(self, timeout: float = -1) -> RawMessage | None:
        if not self._arrives(self._number):
            return None
        message = self._consumer.poll(timeout)
        if message is not None and message.error() is None:
            self._number += 1
            self.offsets.append(message.offset() or 0)
        return message

    def consume(self, _num_messages: int = 1, _timeout: float = -1) -> list[RawMessage]:
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def reader_of(bus: Bus, monkeypatch: pytest.MonkeyPatch, clock: Clock, arrives: Callable[[int], bool]) -> tuple[BlobReader, list[Network]]:
    networks: list[Network] = []
    borrow = BlobReader._borrow

    def through_network(reader: BlobReader) -> Any:
        networks.append(Network(borrow(reader), arrives))
        return networks[-1]

    monkeypatch.setattr(BlobReader, "_borrow", through_network)
    return replace(bus, clock=clock).blob_reader(), networks


def content(folder: Path) -> bytes:
    return b"".join((folder / file.name).read_bytes() for file in FILES)


def test_a_blob_that_comes_slowly_is_read_however_long_it_takes(bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ref, clock = written(bus), ManualClock()

    def a_chunk_every_fifty_seconds(_number: int) -> bool:
        clock.advance(50)
        return True

    reader, _ = reader_of(bus, monkeypatch, clock, a_chunk_every_fifty_seconds)
    assert reader.read(ref, RUN) == DATA
    assert content(reader.read_files(ref, RUN, FILES, tmp_path / "v1")) == DATA
    assert clock.monotonic_s() > 900


def test_a_blob_of_which_nothing_more_comes_is_given_up_and_the_next_attempt_goes_on_there(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ref, clock = written(bus), ManualClock()
    limit = [4]

    def cut_off(number: int) -> bool:
        if number < limit[0]:
            return True
        clock.advance(10)
        return False

    reader, networks = reader_of(bus, monkeypatch, clock, cut_off)
    folder = tmp_path / "v1"
    for attempt in range(2):
        with pytest.raises(DeadlineExceeded, match="Nothing more of the blob v/1/abc came for 60 s"):
            reader.read_files(ref, RUN, FILES, folder)
        assert [path.name for path in tmp_path.iterdir()] == [partial_of(folder).name], attempt
    limit[0] = 100
    assert content(reader.read_files(ref, RUN, FILES, folder)) == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "empty", "model.safetensors"]
    assert [network.offsets for network in networks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def interrupted(bus: Bus, monkeypatch: pytest.MonkeyPatch, ref: BlobRef, folder: Path) -> BlobReader:
    """A reader whose first attempt ended behind chunk 8, inside the last file, and which gets everything from now on."""
    clock = ManualClock()
    is_mended = False

    def until_mended(number: int) -> bool:
        clock.advance(10 if number == 9 and not is_mended else 0)
        return is_mended or number < 9

    reader, _ = reader_of(bus, monkeypatch, clock, until_mended)
    with pytest.raises(DeadlineExceeded):
        reader.read_files(ref, RUN, FILES, folder)
    is_mended = True
    return reader


@pytest.mark.parametrize("damage", ["altered", "shorter", "longer", "gone", "no note", "bad note"])
def test_what_an_earlier_attempt_left_is_not_believed(bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    ref, folder = written(bus), tmp_path / "v1"
    reader = interrupted(bus, monkeypatch, ref, folder)
    file = partial_of(folder) / "config.json"
    match damage:
        case "altered":
            file.write_bytes(b"x" + file.read_bytes()[1:])
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case "longer":
            file.write_bytes(file.read_bytes() + b"x")
        case "gone":
            file.unlink()
        case "no note":
            (partial_of(folder) / ".arrived.json").unlink()
        case "bad note":
            (partial_of(folder) / ".arrived.json").write_text("[]", encoding="utf-8")
    if damage == "altered":
        with pytest.raises(BlobCorrupt):
            reader.read_files(ref, RUN, FILES, folder)
        assert list(tmp_path.iterdir()) == [], "and the attempt after that begins anew"
    assert content(reader.read_files(ref, RUN, FILES, folder)) == DATA


def test_an_attempt_at_other_bytes_of_the_same_name_begins_anew(bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "v1"
    reader = interrupted(bus, monkeypatch, written(bus), folder)
    other = DATA[::-1]
    files = [WeightFile(name="model.safetensors", num_bytes=len(other), sha256=hashlib.sha256(other).hexdigest())]
    reader.read_files(written(bus, other), RUN, files, folder)
    assert (folder / "model.safetensors").read_bytes() == other


def test_chunks_may_be_acknowledged_slowly(bus: Bus) -> None:
    clock = ManualClock()
    waiting: list[int] = []

    class SlowReceipt:
        def wait(self, timeout_s: float) -> Coordinates:
            clock.advance(min(50.0, timeout_s))
            if timeout_s < 50.0:
                raise DeadlineExceeded("not in time")
            return Coordinates(partition=0, offset=waiting.pop(0))

    class SlowPublisher:
        most = number = 0

        def num_partitions(self, _topic: object) -> int:
            return 1

        def publish(self, *_: object, **__: object) -> SlowReceipt:
            waiting.append(self.number)
            self.number += 1
            self.most = max(self.most, len(waiting))
            return SlowReceipt()

    publisher: Any = SlowPublisher()
    ref = BlobWriter(publisher, replace(bus, clock=clock)).write(WEIGHT_CHUNKS, RUN, "v/1/abc", bytes(100 * CHUNK))
    assert (ref.num_chunks, ref.last_offset) == (100, 99)
    assert publisher.most <= 16, "a client gives up what waits in it for too long"


def test_pieces_make_the_same_blob_as_the_whole(bus: Bus) -> None:
    def pieces() -> Iterator[bytes]:
        for start, end in [(0, 1), (1, 1), (1, 350), (350, 950), (950, 1000)]:
            yield DATA[start:end]

    whole = written(bus)
    with closing(bus.publisher(profiles.PRODUCER_BLOBS)) as publisher:
        writer = bus.blob_writer(publisher)
        cut = writer.write(WEIGHT_CHUNKS, RUN, "v/1/abc", pieces(), num_bytes=len(DATA))
        with pytest.raises(BlobCorrupt, match="more than the 900 bytes"):
            writer.write(WEIGHT_CHUNKS, RUN, "v/1/abc", pieces(), num_bytes=900)
        with pytest.raises(BlobCorrupt, match="does not hold the 1001 bytes"):
            writer.write(WEIGHT_CHUNKS, RUN, "v/1/abc", pieces(), num_bytes=1001)
    assert [(chunk.num_bytes, chunk.sha256) for chunk in cut.chunks] == [(chunk.num_bytes, chunk.sha256) for chunk in whole.chunks]
    assert (cut.sha256, cut.num_bytes, cut.num_chunks) == (whole.sha256, 1000, 10)
    assert bus.blob_reader().read(cut, RUN) == DATA


def test_the_manifest_of_a_blob_of_any_size_fits_into_a_record(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 1)
    example = load_examples(WEIGHTS)["adapter.json"]
    assert isinstance(example, WeightManifest)
    longest = written(bus, bytes(blobs.MAX_INLINE_CHUNKS))
    assert len(longest.chunks) == blobs.MAX_INLINE_CHUNKS
    assert len(bus.codec.encode(replace(example, blob=longest))) < MAX_RECORD_BYTES / 2
    beyond = written(bus, bytes(blobs.MAX_INLINE_CHUNKS + 1))
    assert (beyond.num_chunks, beyond.chunks) == (blobs.MAX_INLINE_CHUNKS + 1, ())
    assert bus.blob_reader().read(beyond, RUN) == bytes(beyond.num_bytes)
