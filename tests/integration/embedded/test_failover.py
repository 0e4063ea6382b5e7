"""Three brokers lose one, killed or frozen, and acknowledged records stay; a lost broker comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka, Jit, Jvm, Node
from echo_embedded.readiness import brokers_named
from echo_ops.supervisor.registration import make_topics
from echo_ops.topic_admin import TopicAdmin
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace

pytestmark = pytest.mark.kafka
TOPIC = "survivor"
# Two seconds until a dead broker is fenced, an election, and room for a busy machine.
OUTAGE_S = 60.0
# A default client keeps its request with a frozen broker for a minute.
FAILOVER_CLIENT = {"socket.timeout.ms": 3000, "request.timeout.ms": 2000, "reconnect.backoff.max.ms": 200, "retry.backoff.ms": 50}


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    """Three brokers with one partition on all of them."""
    with EmbeddedKafka(3, jvm=Jvm(jit=Jit.QUICK)) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, 3)])[TOPIC].result(OUTAGE_S)
        yield cluster


def _leader(kafka: EmbeddedKafka) -> Node:
    metadata = AdminClient({"bootstrap.servers": kafka.bootstrap}).list_topics(TOPIC, timeout=OUTAGE_S)
    return kafka.nodes[metadata.topics[TOPIC].partitions[0].leader - 1]


def _write(kafka: EmbeddedKafka, value: bytes) -> int:
    """Write one record with acks=all, once however often it is sent; its offset."""
    offsets: list[int] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        offset = message.offset()
        assert offset is not None
        offsets.append(offset)

    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "acks": "all", "enable.idempotence": True, "log_level": 0, **FAILOVER_CLIENT}
    )
    producer.produce(TOPIC, value, on_delivery=delivered)
    assert producer.flush(OUTAGE_S) == 0, f"no acknowledgement within {OUTAGE_S} s"
    return offsets[0]


def _wait_for_replicas(kafka: EmbeddedKafka, count: int) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    deadline = Deadline.after(OUTAGE_S)
    while len(in_sync := admin.list_topics(TOPIC, timeout=OUTAGE_S).topics[TOPIC].partitions[0].isrs) != count:
        assert not deadline.expired(), f"{len(in_sync)} replicas are in sync, and not {count}, in the end"
        time.sleep(0.1)


def test_three_brokers_hold_three_replicas(kafka: EmbeddedKafka) -> None:
    assert len(kafka.nodes) == 3
    assert len(brokers_named({"bootstrap.servers": kafka.bootstrap}, 5)) == 3
    _wait_for_replicas(kafka, 3)


def test_a_killed_leader_is_replaced_and_comes_back(kafka: EmbeddedKafka) -> None:
    first = _write(kafka, b"before")
    leader = _leader(kafka)
    leader.kill()
    assert _write(kafka, b"after") == first + 1
    leader.start()
    _wait_for_replicas(kafka, 3)


def test_a_namespace_is_as_it_should_be_while_a_broker_is_away(kafka: EmbeddedKafka) -> None:
    """Its topics are compared with what it was made with, not with the brokers that answer: a start succeeds, and nothing is lowered."""
    cluster, namespace = KafkaCluster(kafka.bootstrap), Namespace("echo.away")
    make_topics(cluster, namespace)
    topics = TopicAdmin(cluster, namespace)
    kafka.nodes[2].kill()
    try:
        deadline = Deadline.after(OUTAGE_S)
        while cluster.check() != 2 or not topics.short_of_replicas():
            assert not deadline.expired(), "waited until the cluster knows of two brokers"
            time.sleep(0.1)
        assert topics.plan().is_empty
        assert make_topics(cluster, namespace) == ""
        with pytest.raises(UserError, match="2 brokers answer, and the topics want 3 replicas"):
            make_topics(cluster, Namespace("echo.new"))
    finally:
        kafka.nodes[2].start()
    _wait_for_replicas(kafka, 3)


def test_a_frozen_leader_is_replaced_and_comes_back(kafka: EmbeddedKafka) -> None:
    first = _write(kafka, b"before")
    leader = _leader(kafka)
    leader.suspend()
    try:
        assert _write(kafka, b"after") == first + 1
    finally:
        leader.resume()
    _wait_for_replicas(kafka, 3)


def test_an_orderly_stop_hands_over_at_once(kafka: EmbeddedKafka) -> None:
    first = _write(kafka, b"before")
    leader = _leader(kafka)
    leader.terminate()
    assert not leader.process.is_running()
    assert _write(kafka, b"after") == first + 1
    leader.start()
    _wait_for_replicas(kafka, 3)
