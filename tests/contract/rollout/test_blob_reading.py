"""What a reader of blobs does with a log that does not hold what was promised, and with a client that it keeps."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from echo_bus.blobs.transfer import CHUNK_BYTES, BlobReader
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawConsumer
from echo_bus.client.publisher import Publisher
from echo_bus.errors import BlobCorrupt, DeliveryFailed, OffsetLost
from echo_schemas.records import BlobRef, Chunk, WeightFile
from echo_schemas.topics import WEIGHT_CHUNKS
from tests.contract.conftest import WAIT_S

RUN = "demo"
DATA = bytes(range(251)) * 8_000


@pytest.fixture
def reader(bus: Bus) -> BlobReader:
    return bus.blob_reader()


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def written(bus: Bus, data: bytes, *, blob: str = "v/1/abc", sha256: str | None = None) -> BlobRef:
    with closing(bus.publisher(profiles.PRODUCER_BLOBS)) as publisher:
        return bus.blob_writer(publisher).write(WEIGHT_CHUNKS, RUN, blob, data, sha256=sha256)


def files_of(data: bytes, *sizes: int) -> list[WeightFile]:
    files, start = [], 0
    for number, size in enumerate(sizes):
        files.append(WeightFile(name=f"{number}.bin", num_bytes=size, sha256=sha256_of(data[start : start + size])))
        start += size
    return files


def test_a_client_that_is_kept_reads_one_blob_after_another(bus: Bus, reader: BlobReader, tmp_path: Path) -> None:
    reader.warm(WEIGHT_CHUNKS)
    with closing(reader):
        for number in range(6):
            data = DATA + bytes([number])
            # Names that lie on different partitions.
            ref = written(bus, data, blob=f"v/{number}/abc")
            folder = reader.read_files(ref, RUN, files_of(data, 10, len(data) - 10), tmp_path / f"v{number}")
            assert b"".join((folder / f"{part}.bin").read_bytes() for part in range(2)) == data
    assert reader.read(ref, RUN) == data


def test_a_client_that_is_kept_goes_on_after_a_read_that_failed(bus: Bus, reader: BlobReader) -> None:
    ref = written(bus, DATA)
    reader.warm(WEIGHT_CHUNKS)
    with closing(reader):
        with pytest.raises(BlobCorrupt, match="does not have the promised checksum"):
            reader.read(dataclasses.replace(ref, sha256="0" * 64), RUN)
        assert reader.read(ref, RUN) == DATA


def test_a_checksum_that_the_writer_is_given_is_compared_by_readers(bus: Bus, reader: BlobReader) -> None:
    assert written(bus, DATA, sha256=sha256_of(DATA)).sha256 == written(bus, DATA).sha256
    promised = written(bus, DATA, sha256="1" * 64)
    with pytest.raises(BlobCorrupt, match="The blob v/1/abc does not have the promised checksum"):
        reader.read(promised, RUN)


def offset_of(publisher: Publisher, chunk: Chunk, partition: int) -> int:
    """Where the chunk lies. A busy broker that answers late may have it twice and say no offset of the second: then it comes again."""
    with suppress(DeliveryFailed):
        return publisher.publish(WEIGHT_CHUNKS, chunk, partition=partition).wait(WAIT_S).offset
    return publisher.publish(WEIGHT_CHUNKS, chunk, partition=partition).wait(WAIT_S).offset


def test_the_chunk_that_was_altered_is_named(bus: Bus, reader: BlobReader, tmp_path: Path) -> None:
    good = [DATA[start : start + CHUNK_BYTES] for start in range(0, len(DATA), CHUNK_BYTES)]
    altered = bytes([good[1][0] ^ 1]) + good[1][1:]
    chunks = [
        Chunk(run_id=RUN, blob="v/1/abc", index=index, num_chunks=len(good), sha256=sha256_of(piece), data=data)
        for index, (piece, data) in enumerate(zip(good, [good[0], altered, *good[2:]], strict=True))
    ]
    with closing(bus.publisher(profiles.PRODUCER_BLOBS)) as publisher:
        offsets = [offset_of(publisher, chunk, 0) for chunk in chunks]
    ref = BlobRef(
        topic=WEIGHT_CHUNKS.name,
        partition=0,
        blob="v/1/abc",
        num_bytes=len(DATA),
        sha256=sha256_of(DATA),
        num_chunks=len(good),
        first_offset=min(offsets),
        last_offset=max(offsets),
    )
    with pytest.raises(BlobCorrupt, match=r"Chunk 1 of v/1/abc does not have the promised checksum"):
        reader.read_files(ref, RUN, files_of(DATA, len(DATA)), tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_a_blob_whose_last_chunks_never_came_is_given_up_long_before_the_deadline(bus: Bus, reader: BlobReader, tmp_path: Path) -> None:
    ref = written(bus, DATA)
    promised = dataclasses.replace(ref, num_chunks=ref.num_chunks + 2, last_offset=ref.last_offset + 2, chunks=())
    with closing(bus.publisher(profiles.PRODUCER_BLOBS)) as publisher:
        for index in range(ref.num_chunks):
            piece = DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            chunk = Chunk(run_id=RUN, blob="v/1/abc", index=index, num_chunks=promised.num_chunks, sha256=sha256_of(piece), data=piece)
            where = publisher.publish(WEIGHT_CHUNKS, chunk, partition=ref.partition).wait(WAIT_S)
            promised = dataclasses.replace(promised, first_offset=where.offset - index, last_offset=where.offset + 2)
    with pytest.raises(BlobCorrupt, match=f"Chunk {ref.num_chunks} of {promised.num_chunks} of v/1/abc is not in the log"):
        reader.read_files(promised, RUN, files_of(DATA, len(DATA)), tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_file_whose_checksum_is_wrong_is_named(bus: Bus, reader: BlobReader, tmp_path: Path, wrong: int) -> None:
    ref = written(bus, DATA)
    files = files_of(DATA, 1_000, CHUNK_BYTES, len(DATA) - CHUNK_BYTES - 1_000)
    files[wrong] = dataclasses.replace(files[wrong], sha256="2" * 64)
    with pytest.raises(BlobCorrupt, match=rf"The file {wrong}\.bin does not have the promised checksum"):
        reader.read_files(ref, RUN, files, tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


class CountedAssigns:
    """A consumer, and the partitions that it was sent to."""

    def __init__(self, consumer: RawConsumer, partitions: list[int]) -> None:
        self._consumer, self._partitions = consumer, partitions

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._partitions += [each.partition for each in partitions]
        self._consumer.assign(partitions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def test_many_blobs_are_read_in_one_passage(bus: Bus, reader: BlobReader, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [bytes([number]) * (10 + number) for number in range(30)]
    refs = [written(bus, content, blob=f"v/{number}/abc") for number, content in enumerate(data)]
    partitions: list[int] = []
    borrow = BlobReader._borrow
    monkeypatch.setattr(BlobReader, "_borrow", lambda self: CountedAssigns(borrow(self), partitions))
    found = dict(reader.read_each(refs[::-1], RUN))
    assert [found[number] for number in range(30)] == data[::-1]
    assert sorted(partitions) == sorted({ref.partition for ref in refs}), "each partition is gone to once"


def test_what_is_wrong_with_one_of_many_blobs_is_said_and_the_others_are_read(bus: Bus, reader: BlobReader) -> None:
    data = [DATA + bytes([number]) for number in range(7)]
    refs = [written(bus, content, blob=f"v/{number}/abc") for number, content in enumerate(data)]
    wrong: dict[int, tuple[type[Exception], dict[str, Any]]] = {
        1: (BlobCorrupt, {"sha256": "0" * 64}),
        2: (BlobCorrupt, {"topic": "nowhere"}),
        3: (BlobCorrupt, {"last_offset": refs[3].last_offset - 1}),
        4: (OffsetLost, {"first_offset": -1}),
    }
    asked = [dataclasses.replace(ref, **wrong[number][1]) if number in wrong else ref for number, ref in enumerate(refs)]
    found = dict(reader.read_each([*asked, refs[3]], RUN))
    for number, (error, _) in wrong.items():
        assert isinstance(found[number], error), number
    assert {number: found[number] for number in (0, 5, 6)} == {number: data[number] for number in (0, 5, 6)}
    assert found[7] == data[3], "asked for twice, and wrong only once"


def test_for_no_blobs_no_client_is_opened(reader: BlobReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlobReader, "_borrow", lambda self: pytest.fail("it opened a client"))
    assert list(reader.read_each([], RUN)) == []
