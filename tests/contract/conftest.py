"""One suite over the in-memory cluster and a real Kafka: what a test here sees must be the same on both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster, RawConsumer, RawMessage
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs

WAIT_S = 60.0
_counter = itertools.count(1)

MakeTopic = Callable[..., str]


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Both clusters in turn."""
    if request.param == "memory":
        return MemoryCluster()
    return KafkaCluster(request.getfixturevalue("kafka_bootstrap"))


@pytest.fixture
def make_topic(cluster: Cluster, namespace: Namespace) -> MakeTopic:
    """Makes a topic that no other test uses."""

    def make(num_partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"{namespace.name}.t{next(_counter)}"
        create_topics(cluster, {name: num_partitions}, config)
        return name

    return make


def create_topics(cluster: Cluster, topics: Mapping[str, int], config: Mapping[str, str] | None = None) -> None:
    """Create topics and wait until every one has its leaders."""
    # Kept in a variable: an admin client that is collected while its futures run cancels them.
    admin = cluster.admin()
    wanted = [NewTopic(name, num_partitions=count, replication_factor=1, config=dict(config or {})) for name, count in topics.items()]
    for future in admin.create_topics(wanted).values():
        future.result(WAIT_S)
    deadline = Deadline.after(WAIT_S)
    while not all(_is_led(admin, name, count) for name, count in topics.items()):
        assert not deadline.expired(), f"waited for the leaders of {list(topics)}"


def _is_led(admin: Any, name: str, count: int) -> bool:
    found = admin.list_topics(name, timeout=WAIT_S).topics.get(name)
    return found is not None and len(found.partitions) == count and all(part.leader > 0 for part in found.partitions.values())


@pytest.fixture
def bus(cluster: Cluster, namespace: Namespace) -> Bus:
    """A bus over a namespace with all topics, four partitions at most."""
    create_topics(cluster, {f"{namespace.name}.{spec.name}": min(spec.partitions, 4) for spec in load_topic_specs()})
    return Bus(
        cluster=cluster,
        namespace=namespace,
        role="tester",
        run_id="demo",
    )


@dataclass
class Consumers:
    """Opens consumers and closes them at the end of the test."""

    cluster: Cluster
    opened: list[RawConsumer]

    def open(self, **properties: Any) -> RawConsumer:
        """A reader's properties, with these on top; underscores become dots."""
        own = {name.replace("_", "."): value for name, value in properties.items()}
        consumer = self.cluster.consumer({**profiles.READER, "auto.offset.reset": "earliest", **own})
        self.opened.append(consumer)
        return consumer


@pytest.fixture
def consumers(cluster: Cluster) -> Iterator[Consumers]:
    """See `Consumers`."""
    held = Consumers(cluster, [])
    yield held
    for consumer in held.opened:
        consumer.close()


def read(consumer: RawConsumer, count: int) -> list[RawMessage]:
    """`count` messages, errors left out."""
    found: list[RawMessage] = []
    deadline = Deadline.after(WAIT_S)
    while len(found) < count:
        assert not deadline.expired(), f"waited for {count} messages, {len(found)} came"
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message)
    return found


def error_code(caught: pytest.ExceptionInfo[KafkaException]) -> int:
    """The code inside a KafkaException."""
    return int(caught.value.args[0].code())
