"""The methods of confluent_kafka.admin.AdminClient that the project uses. Answers are futures that are already done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConsumerGroupListing,
    ListConsumerGroupsResult,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from echo_memory.broker import Broker, TopicState
from echo_memory.log import PartitionLog
from echo_memory.metadata import cluster_metadata, partitions_of

T = TypeVar("T")


class MemoryAdmin:
    """See confluent-kafka's `AdminClient`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        return cluster_metadata(self._broker, topic)

    def create_topics(self, topics: list[NewTopic], **_: Any) -> dict[str, Future[None]]:
        def create(topic: NewTopic) -> None:
            self._broker.create_topic(topic.topic, topic.num_partitions, dict(topic.config or {}))

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

    def describe_topics(self, topics: TopicCollection, **_: Any) -> dict[str, Future[SimpleNamespace]]:
        def describe(name: str) -> SimpleNamespace:
            state = self._topic(name)
            return SimpleNamespace(name=name, topic_id=state.topic_id, partitions=partitions_of(state))

        return {name: self._answer(partial(describe, name)) for name in topics.topic_names}

    def describe_configs(self, resources: list[ConfigResource], **_: Any) -> dict[ConfigResource, Future[dict[str, ConfigEntry]]]:
        def describe(resource: ConfigResource) -> dict[str, ConfigEntry]:
            return {name: ConfigEntry(name, value) for name, value in self._topic(resource.name).config.items()}

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

    def list_consumer_groups(self, **_: Any) -> Future[ListConsumerGroupsResult]:
        def listed() -> ListConsumerGroupsResult:
            known = [
                ConsumerGroupListing(name, False, ConsumerGroupState.STABLE if group.members else ConsumerGroupState.EMPTY)
                for name, group in sorted(self._broker.groups.items())
                if group.members or group.committed
            ]
            return ListConsumerGroupsResult(known)

        return self._answer(listed)

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
