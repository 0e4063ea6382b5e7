"""What a consumer can ask of the cluster: how many partitions a topic has, where a partition begins and ends.

Leaders move, and are unknown for a moment after a topic was made: such answers are asked for again until the time is up.
"""

from __future__ import annotations

import time

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from echo_bus.clock import Deadline
from echo_bus.cluster import RawConsumer
from echo_bus.errors import ClusterUnreachable, NotAuthorized, TopicMissing
from echo_bus.kafka import translate

QUERY_S = 10.0
_AGAIN_S = 0.05
_PASSING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)


def num_partitions(consumer: RawConsumer, physical: str, timeout_s: float = QUERY_S) -> int:
    """How many partitions a topic has. Raises TopicMissing, ClusterUnreachable, NotAuthorized."""
    try:
        found = consumer.list_topics(physical, timeout=timeout_s).topics.get(physical)
    except KafkaException as exc:
        raise translate(exc, physical) from exc
    if found is not None and found.error is not None and found.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise NotAuthorized(f"This client may not see the topic {physical}.", hint="Compare with `echoswarm acls render`.")
    if found is None or not found.partitions:
        raise TopicMissing(f"The topic {physical} does not exist.", hint="Run `echoswarm topics apply`.")
    return len(found.partitions)


def watermarks(consumer: RawConsumer, physical: str, partition: int, timeout_s: float = QUERY_S) -> tuple[int, int]:
    """The first offset that a partition holds, and the one after its last. Raises ClusterUnreachable, NotAuthorized, TopicMissing."""
    deadline = Deadline.after(timeout_s)
    asked = TopicPartition(physical, partition)
    while True:
        try:
            found = consumer.get_watermark_offsets(asked, timeout=max(_AGAIN_S, deadline.remaining_s()))
        except KafkaException as exc:
            if exc.args[0].code() not in _PASSING or deadline.expired():
                raise translate(exc, physical) from exc
            time.sleep(_AGAIN_S)
            continue
        if found is None:
            raise ClusterUnreachable(f"The offsets of {physical}[{partition}] were not answered within {timeout_s:g} s.")
        return found
