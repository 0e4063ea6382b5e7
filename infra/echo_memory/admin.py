"""The methods of confluent_kafka.admin.AdminClient that the project uses. Answers are futures that are already done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AlterConfigOpType, ConfigResource, NewPartitions, NewTopic, OffsetSpec, ResourceType

from echo_memory.broker import Broker, TopicState
from echo_memory.log import PartitionLog
from echo_memory.metadata import PartitionMetadata, cluster_metadata

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """What list_offsets answers for one partition."""

    offset: int
    timestamp: int = -1
    leader_epoch: int = 0


@dataclass(frozen=True, slots=True)
class DescribedTopic:
    """What describe_topics answers for one topic."""

    name: str
    topic_id: str
    partitions: list[PartitionMetadata]


@dataclass(frozen=True, slots=True)
class DescribedSetting:
    """One entry of describe_configs."""

    name: str
    value: str
    is_default: bool = False
    source: int = 1


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """One group of list_consumer_groups."""

    group_id: str
    state: ConsumerGroupState


@dataclass(frozen=True, slots=True)
class ListedGroups:
    """What list_consumer_groups answers."""

    valid: list[ListedGroup]


class MemoryAdmin:
    """See confluent-kafka's AdminClient."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        return cluster_metadata(self._broker, topic)

    def create_topics(self, topics: list[NewTopic], **_: Any) -> dict[str, Future[None]]:
        def create(topic: NewTopic) -> None:
            replicas = max(1, int(topic.replication_factor))
            self._broker.create_topic(topic.topic, topic.num_partitions, dict(topic.config or {}), replicas)

        return {topic.topic: self._answer(partial(create, topic)) for topic in topics}

    def delete_topics(self, topics: list[str], **_: Any) -> dict[str, Future[None]]:
        def delete(name: str) -> None:
            self._topic(name)
            del self._broker.topics[name]

        return {name: self._answer(partial(delete, name)) for name in topics}

    def create_partitions(self, partitions: list[NewPartitions], **_: Any) -> dict[str, Future[None]]:
        def grow(wanted: NewPartitions) -> None:
            state = self._topic(wanted.topic)
            if wanted.new_total_count <= len(state.partitions):
                raise KafkaException(KafkaError(KafkaError.INVALID_PARTITIONS))
            while len(state.partitions) < wanted.new_total_count:
                state.partitions.append(PartitionLog())
            for group in self._broker.groups.values():
                group.rebalance()

        return {wanted.topic: self._answer(partial(grow, wanted)) for wanted in partitions}

    def describe_topics(self, topics: TopicCollection, **_: Any) -> dict[str, Future[DescribedTopic]]:
        def describe(name: str) -> DescribedTopic:
            state = self._topic(name)
            return DescribedTopic(name, state.topic_id, [PartitionMetadata(number) for number in range(len(state.partitions))])

        return {name: self._answer(partial(describe, name)) for name in topics.topic_names}

    def describe_configs(self, resources: list[ConfigResource], **_: Any) -> dict[ConfigResource, Future[dict[str, DescribedSetting]]]:
        def describe(resource: ConfigResource) -> dict[str, DescribedSetting]:
            return {name: DescribedSetting(name, value) for name, value in self._topic(resource.name).config.items()}

        return {resource: self._answer(partial(describe, resource)) for resource in resources}

    def incremental_alter_configs(self, resources: list[ConfigResource], **_: Any) -> dict[ConfigResource, Future[None]]:
        def alter(resource: ConfigResource) -> None:
            if resource.restype != ResourceType.TOPIC:
                raise KafkaException(KafkaError(KafkaError.INVALID_REQUEST, "Only topics have settings here."))
            config = self._topic(resource.name).config
            for entry in resource.incremental_configs:
                if entry.incremental_operation == AlterConfigOpType.DELETE:
                    config.pop(entry.name, None)
                else:
                    config[entry.name] = str(entry.value)

        return {resource: self._answer(partial(alter, resource)) for resource in resources}

    def list_offsets(self, wanted: dict[TopicPartition, OffsetSpec], **_: Any) -> dict[TopicPartition, Future[ListedOffset]]:
        def offset_of(partition: TopicPartition, spec: OffsetSpec) -> ListedOffset:
            log = self._log(partition)
            # The kinds of a spec are private classes; only the one for a time carries a number.
            timestamp_ms = getattr(spec, "timestamp", None)
            if timestamp_ms is not None:
                found = log.offset_at(int(timestamp_ms))
                return ListedOffset(-1 if found is None else found)
            return ListedOffset(log.start if type(spec).__name__ == "EarliestSpec" else log.end)

        return {place: self._answer(partial(offset_of, place, spec)) for place, spec in wanted.items()}

    def list_consumer_groups(self, **_: Any) -> Future[ListedGroups]:
        def listed() -> ListedGroups:
            known = [
                ListedGroup(name, ConsumerGroupState.STABLE if group.members else ConsumerGroupState.EMPTY)
                for name, group in sorted(self._broker.groups.items())
                if group.members or group.committed
            ]
            return ListedGroups(known)

        return self._answer(listed)

    def list_consumer_group_offsets(
        self, wanted: list[ConsumerGroupTopicPartitions], **_: Any
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        def offsets_of(request: ConsumerGroupTopicPartitions) -> ConsumerGroupTopicPartitions:
            committed = self._broker.group(request.group_id).committed
            places = request.topic_partitions or [TopicPartition(topic, number) for topic, number in sorted(committed)]
            found = [
                TopicPartition(place.topic, place.partition, committed.get((place.topic, place.partition), (OFFSET_INVALID, ""))[0])
                for place in places
            ]
            return ConsumerGroupTopicPartitions(request.group_id, found)

        return {request.group_id: self._answer(partial(offsets_of, request)) for request in wanted}

    def delete_records(self, partitions: list[TopicPartition], **_: Any) -> dict[TopicPartition, Future[None]]:
        def delete(partition: TopicPartition) -> None:
            log = self._log(partition)
            log.delete_before(log.end if partition.offset < 0 else partition.offset)

        return {partition: self._answer(partial(delete, partition)) for partition in partitions}

    def _answer(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._broker.lock:
            try:
                future.set_result(work())
            except KafkaException as exc:
                future.set_exception(exc)
            self._broker.changed.notify_all()
        return future

    def _topic(self, name: str) -> TopicState:
        try:
            return self._broker.topics[name]
        except KeyError:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"Topic '{name}' does not exist.")) from None

    def _log(self, partition: TopicPartition) -> PartitionLog:
        log = self._broker.partition(partition.topic, partition.partition)
        if log is None:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return log
