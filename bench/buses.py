"""A benchmark's bus, topics and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_schemas.naming import Namespace
from echo_schemas.records import Record
from echo_schemas.topics import Topic

RUN = "bench"
_WAIT_S = 300.0


def bus_of(bootstrap: str, namespace: str, role: str = "operator") -> Bus:
    """A bus for one process of a benchmark."""
    return Bus(cluster=KafkaCluster(bootstrap), namespace=Namespace(namespace), role=role, run_id=RUN)


def create_topics(bus: Bus, partitions: Mapping[str, int]) -> None:
    """Create topics, given as physical name → number of partitions, with one replica."""
    # A name of its own: the futures fail once nothing holds the client.
    admin = bus.cluster.admin()
    for future in admin.create_topics([NewTopic(name, count, 1) for name, count in partitions.items()]).values():
        future.result(_WAIT_S)


def records_of(bus: Bus, topics: Sequence[Topic], within_s: float = _WAIT_S) -> Iterator[Record]:
    """All records that the topics hold now. Raises DeadlineExceeded, TransportError."""
    with closing(bus.reader(topics)) as reader:
        reader.start()
        for messages in reader.read_to_end(Deadline.after(within_s)):
            yield from (message.record for message in messages if message.record is not None)
