"""The answer of `list_topics`: objects with the attributes of confluent-kafka's ClusterMetadata, of one broker."""

from __future__ import annotations

from types import SimpleNamespace

from confluent_kafka import KafkaError

from echo_memory.broker import Broker, TopicState


def cluster_metadata(broker: Broker, topic: str | None) -> SimpleNamespace:
    """All topics, or one; a topic that does not exist comes back with an error and no partitions, as from a real broker."""
    with broker.lock:
        found = {}
        for name in list(broker.topics) if topic is None else [topic]:
            state = broker.topics.get(name)
            error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART) if state is None else None
            partitions = {} if state is None else {each.id: each for each in partitions_of(state)}
            found[name] = SimpleNamespace(topic=name, partitions=partitions, error=error)
        return SimpleNamespace(cluster_id=broker.cluster_id, topics=found, brokers={1: SimpleNamespace(id=1, host="memory", port=0)})


def partitions_of(state: TopicState) -> list[SimpleNamespace]:
    """The partitions of a topic, in order."""
    return [SimpleNamespace(id=number, leader=1, replicas=[1], isrs=[1], error=None) for number in range(len(state.partitions))]
