"""End offsets of topics and what groups have committed, a few requests for all partitions together."""

from __future__ import annotations

import time
from collections.abc import Iterable

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from echo_bus.clock import Deadline
from echo_bus.cluster import Cluster
from echo_bus.errors import TopicMissing
from echo_bus.kafka import translate
from echo_schemas.naming import Namespace
from echo_schemas.topics import REQUESTS, TRAJECTORIES, Topic

_TIMEOUT_S = 15.0
_ASK_AGAIN_S = 0.05
_NO_LEADER_YET = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.REPLICA_NOT_AVAILABLE,
    }
)


class OffsetWatch:
    """Asks one cluster. Not thread-safe. Everything raises TransportError where the cluster does not answer."""

    def __init__(self, cluster: Cluster, namespace: Namespace) -> None:
        self._admin = cluster.admin()
        self._namespace = namespace
        self._partitions: dict[str, list[TopicPartition]] = {}

    def ends(self, topic: Topic) -> int:
        """The sum of the end offsets of its partitions: how many records were ever written, on a topic without transactions."""
        return sum(self._ends(topic).values())

    def written_before(self, topic: Topic, time_ms: int) -> int:
        """How many of them were there at `time_ms` (Unix)."""
        first_since = self._ask(topic, OffsetSpec.for_timestamp(time_ms))
        ends = self._ends(topic)
        return sum(ends[partition] if offset < 0 else offset for partition, offset in first_since.items())

    def lags(self) -> dict[str, int]:
        """Requests that no worker has finished, and trajectories that no reward application has finished (the slowest one's)."""
        try:
            groups = [group.group_id for group in self._admin.list_consumer_groups(request_timeout=_TIMEOUT_S).result().valid]
        except KafkaException as exc:
            raise translate(exc, "the cluster") from exc
        rewards = self._namespace.group("reward")
        scoring = [group for group in groups if group == rewards or group.startswith(f"{rewards}.")]
        lags = {}
        worker = self._namespace.group("worker")
        if worker in groups:
            lags["requests open"] = self._lag(worker, REQUESTS)
        if scoring:
            lags["not yet scored"] = max(self._lag(group, TRAJECTORIES) for group in scoring)
        return lags

    def _lag(self, group: str, topic: Topic) -> int:
        ends = self._ends(topic)
        asked = ConsumerGroupTopicPartitions(group, self._places(topic))
        try:
            answer = self._admin.list_consumer_group_offsets([asked], request_timeout=_TIMEOUT_S)[group].result()
        except KafkaException as exc:
            raise translate(exc, "the cluster") from exc
        committed = {place.partition: max(0, place.offset) for place in answer.topic_partitions}
        return sum(max(0, end - committed.get(partition, 0)) for partition, end in ends.items())

    def _ends(self, topic: Topic) -> dict[int, int]:
        return self._ask(topic, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def _ask(self, topic: Topic, spec: OffsetSpec) -> dict[int, int]:
        """Asked again while partitions of a topic that was made a moment ago have no leader yet."""
        deadline = Deadline.after(_TIMEOUT_S)
        while True:
            try:
                asked = self._admin.list_offsets(dict.fromkeys(self._places(topic), spec), request_timeout=_TIMEOUT_S)
                return {place.partition: answer.result().offset for place, answer in asked.items()}
            except KafkaException as exc:
                if exc.args[0].code() not in _NO_LEADER_YET or deadline.expired():
                    raise translate(exc, "the cluster") from exc
                time.sleep(_ASK_AGAIN_S)

    def _places(self, topic: Topic) -> list[TopicPartition]:
        physical = self._namespace.topic(topic)
        if physical not in self._partitions:
            try:
                found = self._admin.list_topics(physical, timeout=_TIMEOUT_S).topics.get(physical)
            except KafkaException as exc:
                raise translate(exc, "the cluster") from exc
            if found is None or not found.partitions:
                raise TopicMissing(f"The topic {physical} does not exist.", hint="Run `echoswarm topics apply`.")
            self._partitions[physical] = [TopicPartition(physical, partition) for partition in _ids(found.partitions)]
        return self._partitions[physical]


def _ids(partitions: Iterable[int]) -> list[int]:
    return sorted(partitions)
