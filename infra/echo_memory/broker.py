"""The state that all in-memory clients of one cluster share, under one lock: topics, groups, transactional ids, injected faults."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from confluent_kafka import KafkaError, KafkaException

from echo_bus.clock import Clock
from echo_memory.groups import Group
from echo_memory.log import PartitionLog, Stored, Transaction, TransactionState


@dataclass(slots=True)
class TopicState:
    """One topic. A topic that is deleted and created again has another `topic_id`, as in Kafka."""

    name: str
    partitions: list[PartitionLog]
    config: dict[str, str]
    topic_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def copy(self) -> TopicState:
        """A copy that shares no later records."""
        return replace(self, partitions=[log.copy() for log in self.partitions], config=dict(self.config))


@dataclass(slots=True)
class TransactionalId:
    """The newest holder of a transactional id and its open transaction."""

    epoch: int = 0
    transaction: Transaction | None = None


class Faults:
    """Faults for tests. `before` is called with the name of each client operation and may raise to simulate a crash there."""

    def __init__(self) -> None:
        self.before: Callable[[str], None] | None = None
        self.held_topics: set[str] = set()
        self._produce_errors: dict[str, list[KafkaError]] = {}
        self._unproven: list[str] = []

    def hold(self, topic: str) -> None:
        """Keep records for `topic` in their producers until `release`, as for a partition without a leader."""
        self.held_topics.add(topic)

    def release(self, topic: str) -> None:
        """End `hold`; the producers deliver at their next poll or flush."""
        self.held_topics.discard(topic)

    def fail_next_produce(self, topic: str, code: int = KafkaError._MSG_TIMED_OUT) -> None:  # noqa: SLF001  public in librdkafka
        """Refuse the next record for `topic` with `code`."""
        self._produce_errors.setdefault(topic, []).append(KafkaError(code))

    def lose_next_produce(self, topic: str) -> None:
        """Report the next record for `topic` as delivered without appending it, and without an offset. librdkafka does so for a refused
        batch if the next one was accepted.
        """
        self._unproven.append(topic)

    def take_lost(self, topic: str) -> bool:
        """Whether `lose_next_produce` applies to this record for `topic`; once per call of it."""
        if topic not in self._unproven:
            return False
        self._unproven.remove(topic)
        return True

    def take_produce_error(self, topic: str) -> KafkaError | None:
        """Remove and return the error queued for `topic`."""
        queued = self._produce_errors.get(topic)
        return queued.pop(0) if queued else None


class Broker:
    """The cluster's state. The caller of a method must hold `lock`, unless the method says otherwise."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        # Notified at every change that a blocked poll could be waiting for.
        self.changed = threading.Condition(self.lock)
        self.topics: dict[str, TopicState] = {}
        self.groups: dict[str, Group] = {}
        self.transactional: dict[str, TransactionalId] = {}
        self.faults = Faults()
        self.cluster_id = uuid.uuid4().hex

    def enter(self, operation: str) -> None:
        """Every client operation calls this first, without the lock."""
        if self.faults.before is not None:
            self.faults.before(operation)

    def create_topic(self, name: str, num_partitions: int, config: dict[str, str]) -> None:
        if name in self.topics:
            raise KafkaException(KafkaError(KafkaError.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists."))
        if num_partitions < 1:
            raise KafkaException(KafkaError(KafkaError.INVALID_PARTITIONS, "Number of partitions must be larger than 0."))
        self.topics[name] = TopicState(name, [PartitionLog() for _ in range(num_partitions)], config)
        self.changed.notify_all()

    def partition(self, topic: str, partition: int) -> PartitionLog | None:
        state = self.topics.get(topic)
        return state.partitions[partition] if state is not None and 0 <= partition < len(state.partitions) else None

    def group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group(self.partitions_of))

    def partitions_of(self, topics: list[str]) -> list[tuple[str, int]]:
        return [(name, number) for name in sorted(topics) if name in self.topics for number in range(len(self.topics[name].partitions))]

    def append(self, topic: str, partition: int, record: Stored) -> int:
        log = self.topics[topic].partitions[partition]
        if self.topics[topic].config.get("message.timestamp.type") == "LogAppendTime":
            record.timestamp_ms = self.clock.time_ms()
        if record.transaction is not None:
            record.transaction.partitions.add((topic, partition))
        offset = log.append(record)
        self.changed.notify_all()
        return offset

    def take_over(self, transactional_id: str) -> int:
        """Give the id to a new producer and return its epoch. Fences the predecessor and rolls its open transaction back."""
        holder = self.transactional.setdefault(transactional_id, TransactionalId())
        if holder.transaction is not None:
            self.end_transaction(holder, TransactionState.ABORTED)
        holder.epoch += 1
        return holder.epoch

    def end_transaction(self, holder: TransactionalId, state: TransactionState) -> None:
        transaction, holder.transaction = holder.transaction, None
        if transaction is None:
            return
        transaction.state = state
        for topic, partition in sorted(transaction.partitions):
            log = self.partition(topic, partition)
            if log is not None:
                log.append(Stored(0, None, None, None, self.clock.time_ms(), transaction, control=True))
        self.changed.notify_all()
