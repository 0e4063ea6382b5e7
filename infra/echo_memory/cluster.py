"""The in-memory cluster: one broker state, any number of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echo_bus.clock import Clock, SystemClock
from echo_memory.admin import MemoryAdmin
from echo_memory.broker import Broker, TopicState
from echo_memory.consumer import MemoryConsumer
from echo_memory.log import PartitionLog
from echo_memory.producer import MemoryProducer


class MemoryCluster:
    """Implements `echo_bus.client.cluster.Cluster`. Only the admin client creates topics."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._broker = Broker(clock or SystemClock())
        self.faults = self._broker.faults

    def copy(self) -> MemoryCluster:
        """A new cluster with the same topics, records and offsets, but without groups, open transactions, clients and faults."""
        twin = MemoryCluster(self._broker.clock)
        with self._broker.lock:
            twin._broker.cluster_id = self._broker.cluster_id
            twin._broker.topics = {name: state.copy() for name, state in self._broker.topics.items()}
        return twin

    def producer(self, config: Mapping[str, Any]) -> MemoryProducer:
        return MemoryProducer(self._broker, config)

    def consumer(self, config: Mapping[str, Any]) -> MemoryConsumer:
        return MemoryConsumer(self._broker, config)

    def admin(self) -> MemoryAdmin:
        return MemoryAdmin(self._broker)

    def mount(self, topic: str, partitions: Sequence[PartitionLog]) -> None:
        """Add a topic of logs that the caller fills. No client's call."""
        with self._broker.lock:
            self._broker.topics[topic] = TopicState(topic, list(partitions), {})

    def committed(self, topic: str) -> list[tuple[int, int, bytes | None]]:
        """Partition, offset and value of every committed record in `topic`, partition after partition. No client's call."""
        with self._broker.lock:
            return [
                (number, record.offset, record.value)
                for number, log in enumerate(self._broker.topics[topic].partitions)
                for record in log.read(log.start, committed=True)
            ]

    def compact(self, topic: str) -> None:
        with self._broker.lock:
            for log in self._broker.topics[topic].partitions:
                log.compact()

    def fence(self, transactional_id: str) -> None:
        """Fence the producer of this id, as a newer producer would."""
        with self._broker.lock:
            self._broker.take_over(transactional_id)
