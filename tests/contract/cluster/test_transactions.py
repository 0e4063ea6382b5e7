"""Transactions: seen whole or not at all, and a successor fences its predecessor."""

from __future__ import annotations

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster, RawProducer
from echo_bus.client.consumer_queries import committed as committed_positions
from echo_bus.client.consumer_queries import open_asker
from echo_bus.clock import Deadline
from tests.contract.cluster.test_log import wait_for_end
from tests.contract.conftest import WAIT_S, Consumers, MakeTopic, error_code, read


def transactional(cluster: Cluster, name: str) -> RawProducer:
    producer = cluster.producer({**profiles.TRANSACTIONAL, "transactional.id": name})
    producer.init_transactions(WAIT_S)
    return producer


def committed(producer: RawProducer, topic: str, *values: bytes) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    producer.commit_transaction(WAIT_S)


def test_aborted_records_are_invisible_to_committed_readers_and_markers_take_offsets(
    cluster: Cluster, make_topic: MakeTopic, consumers: Consumers
) -> None:
    topic = make_topic()
    producer = transactional(cluster, f"{topic}.id")
    committed(producer, topic, b"one")
    producer.begin_transaction()
    producer.produce(topic, b"never", partition=0)
    producer.flush(WAIT_S)
    producer.abort_transaction(WAIT_S)
    committed(producer, topic, b"two")
    careful, careless = consumers.open(), consumers.open(isolation_level="read_uncommitted")
    for consumer in (careful, careless):
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert [(message.value(), message.offset()) for message in read(careful, 2)] == [(b"one", 0), (b"two", 4)]
    assert [message.value() for message in read(careless, 3)] == [b"one", b"never", b"two"]
    # The last record is readable a moment before the end of the log is told to lie behind its marker.
    deadline = Deadline.after(WAIT_S)
    while (bounds := careful.get_watermark_offsets(TopicPartition(topic, 0), timeout=WAIT_S)) != (0, 6):
        assert not deadline.expired(), f"waited for the end of the log to be 6, it is at {bounds}"


def test_an_open_transaction_hides_what_lies_behind_it(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    producer = transactional(cluster, f"{topic}.id")
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(WAIT_S)
    plain = cluster.producer(dict(profiles.PRODUCER_LATENCY))
    plain.produce(topic, b"plain", partition=0)
    plain.flush(WAIT_S)
    consumer = consumers.open(enable_partition_eof=True)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert wait_for_end(consumer) == 0
    producer.commit_transaction(WAIT_S)
    assert [message.value() for message in read(consumer, 2)] == [b"open", b"plain"]


def test_a_successor_fences_its_predecessor(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    zombie = transactional(cluster, f"{topic}.id")
    zombie.begin_transaction()
    zombie.produce(topic, b"zombie", partition=0)
    zombie.flush(WAIT_S)
    successor = transactional(cluster, f"{topic}.id")
    committed(successor, topic, b"successor")
    with pytest.raises(KafkaException) as caught:
        zombie.commit_transaction(WAIT_S)
    assert error_code(caught) == KafkaError._FENCED
    assert caught.value.args[0].fatal()
    consumer = consumers.open()
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert read(consumer, 1)[0].value() == b"successor"


def test_producing_outside_a_transaction_is_an_error(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    producer = transactional(cluster, f"{topic}.id")
    with pytest.raises(KafkaException) as caught:
        producer.produce(topic, b"v")
    assert error_code(caught) == KafkaError._STATE


def test_a_groups_position_moves_with_the_transaction_or_not_at_all(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    producer = transactional(cluster, f"{topic}.id")
    member = open_asker(cluster, f"{topic}.group", "test")
    try:
        for offset, ends in ((3, producer.abort_transaction), (2, producer.commit_transaction)):
            producer.begin_transaction()
            producer.produce(topic, b"one", partition=0)
            producer.flush(WAIT_S)
            producer.send_offsets_to_transaction(
                [TopicPartition(topic, 0, offset, "why")], member.consumer_group_metadata(), WAIT_S
            )  # fmt: skip
            ends(WAIT_S)
        (found,) = committed_positions(member, [(topic, 0)])
        assert (found.offset, found.metadata) == (2, "why")
    finally:
        member.close()
