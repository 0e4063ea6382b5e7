"""Producing, reading, positions, retention: the same on both clusters."""

from __future__ import annotations

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster, RawMessage, RawProducer
from echo_bus.clock import Deadline, SystemClock
from echo_schemas.partitioning import partition_of
from tests.contract.conftest import WAIT_S, Consumers, MakeTopic, error_code, read


def producer_of(cluster: Cluster) -> RawProducer:
    return cluster.producer(dict(profiles.PRODUCER_LATENCY))


def fill(cluster: Cluster, topic: str, count: int, partition: int = 0) -> None:
    producer = producer_of(cluster)
    for number in range(count):
        producer.produce(topic, f"{number}".encode(), partition=partition)
    assert producer.flush(WAIT_S) == 0


def test_what_is_written_is_read_as_it_was(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    producer = producer_of(cluster)
    reports: list[tuple[KafkaError | None, RawMessage]] = []
    producer.produce(topic, b"value", key="key", headers=[("a", b"1"), ("a", b"2")], on_delivery=lambda *report: reports.append(report))
    assert producer.flush(WAIT_S) == 0
    ((error, report),) = reports
    assert error is None
    assert (report.topic(), report.partition(), report.offset()) == (topic, 0, 0)
    consumer = consumers.open()
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    (message,) = read(consumer, 1)
    assert (message.key(), message.value(), message.offset(), len(message)) == (b"key", b"value", 0, 5)
    assert message.headers() == [("a", b"1"), ("a", b"2")]
    assert message.timestamp()[1] > 1_700_000_000_000


def test_a_null_value_is_a_tombstone_and_no_headers_are_none(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    producer = producer_of(cluster)
    producer.produce(topic, None, key=b"gone")
    producer.flush(WAIT_S)
    consumer = consumers.open()
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    (message,) = read(consumer, 1)
    assert (message.value(), message.headers()) == (None, None)


def test_a_key_decides_the_partition_by_murmur2(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(5)
    producer = producer_of(cluster)
    places: dict[str, int | None] = {}

    def note(_: KafkaError | None, message: RawMessage) -> None:
        places[(message.key() or b"").decode()] = message.partition()

    for number in range(20):
        producer.produce(topic, b"v", key=f"demo/{number}", on_delivery=note)
    producer.flush(WAIT_S)
    assert places == {key: partition_of(key, 5) for key in places}
    assert len(places) == 20


def test_offsets_of_a_partition_are_dense_and_in_order(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    fill(cluster, topic, 50)
    consumer = consumers.open()
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    messages = read(consumer, 50)
    assert [message.offset() for message in messages] == list(range(50))
    assert [message.value() for message in messages] == [f"{number}".encode() for number in range(50)]


def test_a_missing_topic_is_a_failed_delivery_not_a_new_topic(cluster: Cluster, make_topic: MakeTopic) -> None:
    missing = f"{make_topic()}.missing"
    producer = cluster.producer({**profiles.PRODUCER_LATENCY, "topic.metadata.propagation.max.ms": 100})
    codes: list[int] = []
    producer.produce(missing, b"v", on_delivery=lambda error, _: codes.append(error.code() if error else 0))
    producer.flush(WAIT_S)
    assert codes[0] in {KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
    assert missing not in cluster.admin().list_topics(timeout=WAIT_S).topics


def test_a_full_buffer_is_a_buffer_error(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    producer = cluster.producer({**profiles.PRODUCER_LATENCY, "queue.buffering.max.messages": 3, "linger.ms": 60_000})
    for _ in range(3):
        producer.produce(topic, b"v")
    with pytest.raises(BufferError):
        producer.produce(topic, b"v")
    assert producer.flush(WAIT_S) == 0
    producer.produce(topic, b"v")
    assert producer.flush(WAIT_S) == 0


def test_seek_and_position(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    fill(cluster, topic, 10)
    consumer = consumers.open()
    consumer.assign([TopicPartition(topic, 0, 7)])
    assert [message.offset() for message in read(consumer, 3)] == [7, 8, 9]
    assert consumer.position([TopicPartition(topic, 0)])[0].offset == 10
    consumer.seek(TopicPartition(topic, 0, 2))
    assert read(consumer, 1)[0].offset() == 2


def test_from_the_end_only_what_comes_later_is_read(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    fill(cluster, topic, 5)
    consumer = consumers.open(enable_partition_eof=True)
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    wait_for_end(consumer)
    fill(cluster, topic, 1)
    assert read(consumer, 1)[0].offset() == 5


def wait_for_end(consumer: object) -> int:
    """Poll until the end of the partition is announced; its offset."""
    deadline = Deadline.after(WAIT_S)
    while not deadline.expired():
        message = consumer.poll(0.2)  # type: ignore[attr-defined]
        if message is not None and message.error() is not None and message.error().code() == KafkaError._PARTITION_EOF:
            return int(message.offset())
    raise AssertionError("waited for the end of the partition to be announced")


def test_the_end_is_announced_where_it_is_asked_for(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    fill(cluster, topic, 3)
    consumer = consumers.open(enable_partition_eof=True)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert wait_for_end(consumer) == 3


def test_paused_partitions_are_not_read_and_come_back(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic(2)
    consumer = consumers.open()
    places = [TopicPartition(topic, 0, OFFSET_BEGINNING), TopicPartition(topic, 1, OFFSET_BEGINNING)]
    consumer.assign(places)
    consumer.pause([TopicPartition(topic, 0)])
    fill(cluster, topic, 1, partition=0)
    fill(cluster, topic, 1, partition=1)
    assert read(consumer, 1)[0].partition() == 1
    assert consumer.poll(0.3) is None
    consumer.resume([TopicPartition(topic, 0)])
    assert read(consumer, 1)[0].partition() == 0


def test_consume_takes_what_is_there(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    fill(cluster, topic, 20)
    consumer = consumers.open()
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    taken: list[RawMessage] = []
    deadline = Deadline.after(WAIT_S)
    while len(taken) < 20:
        assert not deadline.expired(), f"waited for 20 messages, {len(taken)} came"
        batch = consumer.consume(8, 0.2)
        assert len(batch) <= 8
        taken += batch
    assert [message.offset() for message in taken] == list(range(20))


def test_retention_moves_the_low_watermark_and_a_lost_position_is_an_error(
    cluster: Cluster, make_topic: MakeTopic, consumers: Consumers
) -> None:
    topic = make_topic()
    fill(cluster, topic, 10)
    admin = cluster.admin()
    admin.delete_records([TopicPartition(topic, 0, 6)])[TopicPartition(topic, 0)].result(WAIT_S)
    consumer = consumers.open(auto_offset_reset="error")
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=WAIT_S) == (6, 10)
    consumer.assign([TopicPartition(topic, 0, 3)])
    deadline = Deadline.after(WAIT_S)
    message = None
    while message is None:
        assert not deadline.expired(), "waited for the lost position to be reported"
        message = consumer.poll(0.2)
    error = message.error()
    assert error is not None
    assert error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


def test_offsets_for_times(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    producer = producer_of(cluster)
    # Of today: older ones retention takes away as soon as it looks.
    first_ms = SystemClock().time_ms()
    for number in range(3):
        producer.produce(topic, b"v", timestamp=first_ms + number * 1_000)
    producer.flush(WAIT_S)
    consumer = consumers.open()
    (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, first_ms + 1_000)], timeout=WAIT_S)
    assert found.offset == 1
    (beyond,) = consumer.offsets_for_times([TopicPartition(topic, 0, first_ms + 9_000)], timeout=WAIT_S)
    assert beyond.offset == OFFSET_END


def test_creating_a_topic_twice_is_refused(cluster: Cluster, make_topic: MakeTopic) -> None:
    from confluent_kafka.admin import NewTopic

    topic = make_topic()
    admin = cluster.admin()
    with pytest.raises(KafkaException) as caught:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(WAIT_S)
    assert error_code(caught) == KafkaError.TOPIC_ALREADY_EXISTS


def test_a_topic_made_anew_has_another_identity(cluster: Cluster, make_topic: MakeTopic) -> None:
    from confluent_kafka import TopicCollection
    from confluent_kafka.admin import NewTopic

    topic = make_topic()
    admin = cluster.admin()

    def identity() -> str:
        return str(admin.describe_topics(TopicCollection([topic]))[topic].result(WAIT_S).topic_id)

    first = identity()
    assert identity() == first
    admin.delete_topics([topic])[topic].result(WAIT_S)
    deadline = Deadline.after(WAIT_S)
    while True:
        try:
            admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(WAIT_S)
            break
        except KafkaException:
            # Deletion goes on in the background for a moment.
            assert not deadline.expired(), "waited for the topic to be gone"
    while True:
        try:
            assert identity() != first
            break
        except KafkaException:
            assert not deadline.expired(), "waited for the topic to be there again"
