"""What the in-memory cluster can do beyond a real one: compaction on demand, faults, expired sessions."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from confluent_kafka.admin import NewTopic

from echo_bus.blobs.transfer import CHUNK_BYTES
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_bus.errors import DeliveryFailed, ProducerFenced, TransactionAborted
from echo_memory import MemoryCluster
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS, TOPICS, WEIGHT_CHUNKS
from tests.examples import load_examples

NAMESPACE = Namespace("unit")
WAIT_S = 60.0


@pytest.fixture
def cluster() -> MemoryCluster:
    made = MemoryCluster()
    made.admin().create_topics([NewTopic(NAMESPACE.topic(topic), 2, 1) for topic in TOPICS])
    return made


@pytest.fixture
def bus(cluster: MemoryCluster) -> Bus:
    return Bus(
        cluster=cluster,
        namespace=NAMESPACE,
        role="tester",
        run_id="demo",
    )


def progress(version: int = 1) -> Progress:
    example = load_examples(PROGRESS)["progress.json"]
    assert isinstance(example, Progress)
    return dataclasses.replace(example, version=version, published=version)


def values(cluster: MemoryCluster, topic: str) -> list[tuple[int | None, bytes | None]]:
    consumer = cluster.consumer({"auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found = [(message.offset(), message.value()) for message in consumer.consume(100, 0)]
    consumer.close()
    return found


def test_compaction_keeps_the_newest_of_each_key_and_no_tombstones(cluster: MemoryCluster) -> None:
    topic = NAMESPACE.topic(PROGRESS)
    producer = cluster.producer({})
    for key, value in [("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("c", None)]:
        producer.produce(topic, value, key=key, partition=0)
    producer.flush(WAIT_S)
    cluster.compact(topic)
    assert values(cluster, topic) == [(1, b"2"), (2, b"3")]


def test_a_held_topic_blocks_a_full_publisher_until_it_is_released(cluster: MemoryCluster, bus: Bus) -> None:
    topic = NAMESPACE.topic(PROGRESS)
    cluster.faults.hold(topic)
    publisher = bus.publisher({**profiles.PRODUCER_LATENCY, "queue.buffering.max.messages": 3})
    published = threading.Semaphore(0)

    def publish() -> None:
        for version in range(5):
            publisher.publish(PROGRESS, progress(version), partition=0)
            published.release()

    thread = threading.Thread(target=publish)
    thread.start()
    for _ in range(3):
        assert published.acquire(timeout=WAIT_S), "waited for the buffer to fill"
    assert not published.acquire(timeout=0.2), "a full buffer did not hold the caller back"
    cluster.faults.release(topic)
    thread.join(WAIT_S)
    publisher.close()
    assert len(values(cluster, topic)) == 5


def test_a_failed_record_is_raised_by_receipt_and_flush(cluster: MemoryCluster, bus: Bus) -> None:
    cluster.faults.fail_next_produce(NAMESPACE.topic(PROGRESS))
    publisher = bus.publisher()
    receipt = publisher.publish(PROGRESS, progress())
    with pytest.raises(DeliveryFailed, match="not acknowledged"):
        receipt.wait(WAIT_S)
    with pytest.raises(DeliveryFailed):
        publisher.flush(WAIT_S)
    publisher.publish(PROGRESS, progress()).wait(WAIT_S)
    publisher.close()


def test_a_record_that_is_called_delivered_and_is_nowhere_has_failed(cluster: MemoryCluster, bus: Bus) -> None:
    cluster.faults.lose_next_produce(NAMESPACE.topic(PROGRESS))
    publisher = bus.publisher()
    receipt = publisher.publish(PROGRESS, progress(), partition=0)
    with pytest.raises(DeliveryFailed, match="without an offset"):
        receipt.wait(WAIT_S)
    with pytest.raises(DeliveryFailed):
        publisher.flush(WAIT_S)
    publisher.publish(PROGRESS, progress(), partition=0).wait(WAIT_S)
    publisher.close()
    assert len(values(cluster, NAMESPACE.topic(PROGRESS))) == 1


def test_a_lost_record_of_a_transaction_rolls_it_back(cluster: MemoryCluster, bus: Bus) -> None:
    writer = bus.transactions()
    writer.start(WAIT_S)
    cluster.faults.lose_next_produce(NAMESPACE.topic(PROGRESS))
    with pytest.raises(DeliveryFailed, match="without an offset"), writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress(), partition=0)
    with writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress(7), partition=0)
    assert len(values(cluster, NAMESPACE.topic(PROGRESS))) == 1


@pytest.mark.parametrize("name", [name for name in dir(profiles) if name.startswith("PRODUCER_") or name == "TRANSACTIONAL"])
def test_nothing_is_sent_behind_what_is_not_acknowledged(name: str) -> None:
    """Unless its writer sees to it: `BlobWriter` does."""
    most = getattr(profiles, name)["max.in.flight.requests.per.connection"]
    assert (most == 1) == (name != "PRODUCER_BLOBS")


def test_the_first_chunk_on_a_partition_goes_alone(cluster: MemoryCluster, bus: Bus) -> None:
    publisher = bus.publisher(profiles.PRODUCER_BLOBS)
    writer, data = bus.blob_writer(publisher), bytes(2 * CHUNK_BYTES + 1)
    cluster.faults.lose_next_produce(NAMESPACE.topic(WEIGHT_CHUNKS))
    with pytest.raises(DeliveryFailed, match="without an offset"):
        writer.write(WEIGHT_CHUNKS, "demo", "v/1/a", data)
    with pytest.raises(DeliveryFailed):
        publisher.flush(WAIT_S)
    ref = writer.write(WEIGHT_CHUNKS, "demo", "v/1/a", data)
    assert (ref.first_offset, ref.last_offset) == (0, 2), "chunks had been sent behind one that nobody had acknowledged"
    assert bus.blob_reader().read(ref, "demo") == data
    publisher.close()


def test_a_failed_record_rolls_its_transaction_back(cluster: MemoryCluster, bus: Bus) -> None:
    writer = bus.transactions()
    writer.start(WAIT_S)
    cluster.faults.fail_next_produce(NAMESPACE.topic(PROGRESS), KafkaError._MSG_TIMED_OUT)
    with pytest.raises((DeliveryFailed, TransactionAborted)), writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress(1), partition=0)
    with writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress(2), partition=0)
    assert [lock_file_codec().decode(value) for _, value in values(cluster, NAMESPACE.topic(PROGRESS))] == [progress(2)]


def test_a_fenced_writer_is_dead(cluster: MemoryCluster, bus: Bus) -> None:
    writer = bus.transactions("learner")
    writer.start(WAIT_S)
    cluster.fence(NAMESPACE.transactional_id("learner"))
    with pytest.raises(ProducerFenced, match="session claim"), writer.transaction():
        pass


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("operation", ["begin_transaction", "produce", "flush", "commit_transaction"])
def test_a_crash_at_any_call_of_a_transaction_leaves_nothing_of_it(cluster: MemoryCluster, bus: Bus, operation: str) -> None:
    writer = bus.transactions("learner")
    writer.start(WAIT_S)

    def crash_at(called: str) -> None:
        if called == operation:
            raise Crash

    cluster.faults.before = crash_at
    with pytest.raises(Crash), writer.transaction() as transaction:
        transaction.publish(PROGRESS, progress(1), partition=0)
    cluster.faults.before = None
    successor = bus.transactions("learner")
    successor.start(WAIT_S)
    with successor.transaction() as transaction:
        transaction.publish(PROGRESS, progress(2), partition=0)
    assert [lock_file_codec().decode(value) for _, value in values(cluster, NAMESPACE.topic(PROGRESS))] == [progress(2)]


def test_an_expired_member_loses_its_partitions_and_joins_again(cluster: MemoryCluster) -> None:
    topic = NAMESPACE.topic(PROGRESS)
    first = cluster.consumer({"group.id": "g", "auto.offset.reset": "earliest"})
    second = cluster.consumer({"group.id": "g", "auto.offset.reset": "earliest"})
    lost: list[int] = []
    first.subscribe([topic], on_lost=lambda _, places: lost.extend(place.partition for place in places))
    first.poll(0)
    assert len(first.assignment()) == 2
    first.expire_session()
    second.subscribe([topic])
    second.poll(0)
    assert len(second.assignment()) == 2
    deadline = Deadline.after(WAIT_S)
    while len(first.assignment()) != 1:
        assert not deadline.expired(), "waited for the expired member to have a share again"
        first.poll(0.01)
        second.poll(0.01)
    assert sorted(lost) == [0, 1]
    first.close()
    second.close()
