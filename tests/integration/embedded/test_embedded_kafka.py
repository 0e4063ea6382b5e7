"""The embedded broker is a real Kafka: it takes a record and gives it back."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from echo_schemas.naming import Namespace

pytestmark = pytest.mark.kafka


def test_a_record_goes_in_and_comes_out(kafka_bootstrap: str, namespace: Namespace) -> None:
    topic = f"{namespace.name}.echo"
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "acks": "all"})
    producer.produce(topic, b"value", b"key")
    assert producer.flush(10) == 0, "the record was not acknowledged in 10 s"
    consumer = Consumer({"bootstrap.servers": kafka_bootstrap, "group.id": topic})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(10)
    finally:
        consumer.close()
    assert message is not None, "no record arrived in 10 s"
    assert (message.key(), message.value(), message.error()) == (b"key", b"value", None)
