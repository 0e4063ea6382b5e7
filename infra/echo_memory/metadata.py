"""The answer of `list_topics`: objects with the attributes of confluent-kafka's ClusterMetadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from confluent_kafka import KafkaError

from echo_memory.broker import Broker


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """One partition, on the only broker."""

    id: int
    leader: int = 1
    replicas: list[int] = field(default_factory=lambda: [1])
    isrs: list[int] = field(default_factory=lambda: [1])
    error: KafkaError | None = None


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic."""

    topic: str
    partitions: dict[int, PartitionMetadata]
    error: KafkaError | None = None


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """The one broker."""

    id: int = 1
    host: str = "memory"
    port: int = 0


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """The cluster."""

    cluster_id: str
    topics: dict[str, TopicMetadata]
    brokers: dict[int, BrokerMetadata] = field(default_factory=lambda: {1: BrokerMetadata()})


def cluster_metadata(broker: Broker, topic: str | None) -> ClusterMetadata:
    """All topics, or one; a topic that does not exist comes back with an error and no partitions, as from a real broker."""
    with broker.lock:
        names = list(broker.topics) if topic is None else [topic]
        found = {}
        for name in names:
            state = broker.topics.get(name)
            if state is None:
                found[name] = TopicMetadata(name, {}, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            else:
                found[name] = TopicMetadata(name, {number: PartitionMetadata(number) for number in range(len(state.partitions))})
        return ClusterMetadata(broker.cluster_id, found)
