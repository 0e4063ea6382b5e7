"""Publisher, transactions and blobs, over both clusters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from echo_bus.blobs.transfer import CHUNK_BYTES
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Deadline
from echo_bus.errors import BlobCorrupt, OffsetLost, ProducerClosed, ProducerFenced, RecordTooLarge, TopicMissing, TransportError
from echo_bus.reading.reader import Isolation
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import BlobRef, Progress, WeightFile, WeightManifest
from echo_schemas.topics import PROGRESS, TRAJECTORIES, WEIGHT_CHUNKS, WEIGHTS, weights_key
from tests.contract.conftest import WAIT_S
from tests.examples import load_examples


def progress(version: int = 1) -> Progress:
    example = load_examples(PROGRESS)["progress.json"]
    assert isinstance(example, Progress)
    return dataclasses.replace(example, version=version, published=version)


def manifest() -> WeightManifest:
    example = load_examples(WEIGHTS)["adapter.json"]
    assert isinstance(example, WeightManifest)
    return example


def read_back(bus: Bus, topic: object = PROGRESS, isolation: Isolation = Isolation.COMMITTED, *, at_least: int = 0) -> list[object]:
    """The log to its end, once it has `at_least` records: a broker answers a commit before it has written the marker."""
    deadline = Deadline.after(WAIT_S)
    reader = bus.reader([topic], isolation=isolation)  # type: ignore[list-item]
    try:
        while True:
            reader.start()
            found: list[object] = [message.record for batch in reader.read_to_end(deadline) for message in batch]
            if len(found) >= at_least:
                return found
            assert not deadline.expired(), f"waited for {at_least} records, {len(found)} came"
    finally:
        reader.close()


def test_receipts_name_the_coordinates_in_order(bus: Bus) -> None:
    publisher = bus.publisher()
    receipts = [publisher.publish(PROGRESS, progress(version), partition=0) for version in range(5)]
    places = [receipt.wait(WAIT_S) for receipt in receipts]
    assert [place.offset for place in places] == [0, 1, 2, 3, 4]
    publisher.close()
    assert read_back(bus) == [progress(version) for version in range(5)]


def test_a_callback_that_raises_is_heard_of_and_ends_no_other_acknowledgement(bus: Bus) -> None:
    def fail(_: object) -> None:
        raise ValueError("What follows cannot be done.")

    publisher = bus.publisher()
    publisher.publish(PROGRESS, progress()).on_done(fail)
    with pytest.raises(TransportError, match="What follows cannot be done"):
        publisher.flush(WAIT_S)
    publisher.publish(PROGRESS, progress()).wait(WAIT_S)
    publisher.close()


def test_callbacks_run_once_whether_asked_before_or_after(bus: Bus) -> None:
    publisher = bus.publisher()
    seen: list[str] = []
    receipt = publisher.publish(PROGRESS, progress())
    receipt.on_done(lambda _: seen.append("before"))
    receipt.wait(WAIT_S)
    publisher.flush(WAIT_S)
    receipt.on_done(lambda _: seen.append("after"))
    assert seen == ["before", "after"]
    publisher.close()


def test_a_failed_delivery_is_raised_by_the_receipt_and_by_the_next_call_once(bus: Bus) -> None:
    elsewhere = dataclasses.replace(bus, namespace=type(bus.namespace)(f"{bus.namespace.name}.nowhere"))
    publisher = elsewhere.publisher({**profiles.PRODUCER_LATENCY, "topic.metadata.propagation.max.ms": 100})
    receipt = publisher.publish(PROGRESS, progress())
    with pytest.raises(TopicMissing):
        receipt.wait(WAIT_S)
    with pytest.raises(TopicMissing):
        publisher.publish(PROGRESS, progress())
    publisher.close()
    with pytest.raises(ProducerClosed):
        publisher.publish(PROGRESS, progress())


def test_a_record_that_contradicts_itself_or_is_too_large_never_leaves(bus: Bus) -> None:
    publisher = bus.publisher()
    with pytest.raises(InvalidRecord):
        publisher.publish(PROGRESS, dataclasses.replace(progress(), version=-1))
    big = load_examples(TRAJECTORIES)["single_turn.json"]
    with pytest.raises(RecordTooLarge, match="travels as a blob"):
        publisher.publish(TRAJECTORIES, dataclasses.replace(big, prompt="x" * 900_001))  # type: ignore[type-var]
    publisher.close()
    assert read_back(bus) == []


def test_a_small_buffer_holds_the_caller_back_and_loses_nothing(bus: Bus) -> None:
    publisher = bus.publisher({**profiles.PRODUCER_LATENCY, "queue.buffering.max.messages": 5})
    for version in range(200):
        publisher.publish(PROGRESS, progress(version), partition=0)
    publisher.close(WAIT_S)
    assert read_back(bus) == [progress(version) for version in range(200)]


def publish_and_fail(writer: TransactionalWriter) -> None:
    with writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress())
        raise ZeroDivisionError


def publish_and_be_fenced(zombie: TransactionalWriter, successor: TransactionalWriter) -> None:
    with zombie.transaction() as transaction:
        transaction.publish(PROGRESS, progress(1))
        successor.start(WAIT_S)


def test_a_transaction_is_seen_whole_or_not_at_all(bus: Bus) -> None:
    writer = bus.transactions("learner")
    writer.start(WAIT_S)
    with writer.transaction() as transaction:
        transaction.publish(WEIGHTS, manifest())
        transaction.publish(WEIGHTS, manifest(), key=weights_key("demo", None))
    with pytest.raises(ZeroDivisionError):
        publish_and_fail(writer)
    assert read_back(bus, WEIGHTS, at_least=2) == [manifest(), manifest()]
    assert read_back(bus, PROGRESS) == []
    with writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress())
    assert read_back(bus, PROGRESS, at_least=1) == [progress()]
    writer.close()


def test_a_fenced_writer_says_that_a_successor_may_exist(bus: Bus) -> None:
    zombie, successor = bus.transactions("learner"), bus.transactions("learner")
    zombie.start(WAIT_S)
    with pytest.raises(ProducerFenced, match="dead"):
        publish_and_be_fenced(zombie, successor)
    with successor.transaction() as transaction:
        transaction.publish(PROGRESS, progress(2))
    assert read_back(bus, at_least=1) == [progress(2)]
    successor.close()


def written(bus: Bus, data: bytes) -> BlobRef:
    publisher = bus.publisher(profiles.PRODUCER_BLOBS)
    ref = bus.blob_writer(publisher).write(WEIGHT_CHUNKS, "demo", "v/1/abc", data)
    publisher.close()
    return ref


DATA = bytes(range(256)) * 8_000


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_a_blob_comes_back_as_it_was(bus: Bus, size: int) -> None:
    ref = written(bus, DATA[:size])
    assert ref.num_chunks == max(1, -(-size // CHUNK_BYTES))
    assert bus.blob_reader().read(ref, "demo") == DATA[:size]


def files_of(data: bytes, *sizes: int) -> list[WeightFile]:
    import hashlib

    files, start = [], 0
    for number, size in enumerate(sizes):
        piece = data[start : start + size]
        files.append(WeightFile(name=f"part/{number}.bin", num_bytes=size, sha256=hashlib.sha256(piece).hexdigest()))
        start += size
    return files


def test_a_blob_of_files_appears_whole(bus: Bus, tmp_path: Path) -> None:
    ref = written(bus, DATA)
    sizes = (10, 0, 1_000_000, len(DATA) - 1_000_010)
    folder = bus.blob_reader().read_files(ref, "demo", files_of(DATA, *sizes), tmp_path / "v1")
    assert [(folder / f"part/{number}.bin").stat().st_size for number in range(4)] == list(sizes)
    assert b"".join((folder / f"part/{number}.bin").read_bytes() for number in range(4)) == DATA
    with pytest.raises(FileExistsError):
        bus.blob_reader().read_files(ref, "demo", [], tmp_path / "v1")


@pytest.mark.parametrize(
    "change",
    [
        lambda ref: dataclasses.replace(ref, sha256="0" * 64),
        lambda ref: dataclasses.replace(ref, chunks=(dataclasses.replace(ref.chunks[0], sha256="0" * 64), *ref.chunks[1:])),
        lambda ref: dataclasses.replace(ref, blob="v/1/other"),
        lambda ref: dataclasses.replace(ref, num_chunks=ref.num_chunks + 1, chunks=()),
        lambda ref: dataclasses.replace(ref, last_offset=ref.first_offset),
        lambda ref: dataclasses.replace(ref, topic="no.such.topic"),
    ],
)
def test_a_blob_that_is_not_what_was_promised_leaves_nothing_behind(bus: Bus, tmp_path: Path, change: object) -> None:
    ref = change(written(bus, DATA))  # type: ignore[operator]
    with pytest.raises(BlobCorrupt):
        bus.blob_reader().read_files(ref, "demo", files_of(DATA, len(DATA)), tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [(len(DATA) - 1,), (len(DATA) + 1,)])
def test_files_that_do_not_fill_the_blob_leave_nothing_behind(bus: Bus, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    ref = written(bus, DATA)
    with pytest.raises(BlobCorrupt):
        bus.blob_reader().read_files(ref, "demo", files_of(DATA + b"x", *sizes), tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_a_blob_that_retention_took_is_a_lost_offset(bus: Bus) -> None:
    from confluent_kafka import TopicPartition

    ref = written(bus, DATA)
    place = TopicPartition(bus.namespace.topic(WEIGHT_CHUNKS), ref.partition, ref.last_offset + 1)
    admin = bus.cluster.admin()
    admin.delete_records([place])[place].result(WAIT_S)
    with pytest.raises(OffsetLost, match="Retention has removed"):
        bus.blob_reader().read(ref, "demo")


def test_foreign_chunks_between_ours_are_passed_over(bus: Bus) -> None:
    publisher = bus.publisher(profiles.PRODUCER_BLOBS)
    writer = bus.blob_writer(publisher)
    first = writer.write(WEIGHT_CHUNKS, "demo", "v/1/abc", DATA)
    again = writer.write(WEIGHT_CHUNKS, "demo", "v/1/abc", DATA)
    publisher.close()
    spanning = dataclasses.replace(first, last_offset=again.last_offset, chunks=())
    assert bus.blob_reader().read(spanning, "demo") == DATA
