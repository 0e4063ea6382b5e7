"""A producer with the methods of confluent_kafka.Producer. Records are appended at once; their reports wait for poll or flush."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from echo_bus.client.cluster import DeliveryCallback, Headers
from echo_memory.broker import Broker, TransactionalId
from echo_memory.log import Stored, Transaction, TransactionState
from echo_memory.metadata import cluster_metadata
from echo_schemas.partitioning import murmur2

_ANY_PARTITION = -1
# librdkafka's default of queue.buffering.max.messages.
_DEFAULT_QUEUE = 100_000
_POLL_STEP_S = 0.05


@dataclass(slots=True)
class _Pending:
    topic: str
    partition: int
    record: Stored
    callback: DeliveryCallback | None
    error: KafkaError | None = None
    sent: bool = False
    lost: bool = False


class MemoryProducer:
    """See `cluster.RawProducer`. Thread-safe."""

    def __init__(self, broker: Broker, config: Mapping[str, Any]) -> None:
        self._broker = broker
        self._limit = int(config.get("queue.buffering.max.messages", _DEFAULT_QUEUE))
        self._transactional_id: str | None = config.get("transactional.id")
        self._epoch: int | None = None
        self._transaction: Transaction | None = None
        self._queue: deque[_Pending] = deque()
        self._random = random.Random(0)

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | str | None = None,
        partition: int = _ANY_PARTITION,
        on_delivery: DeliveryCallback | None = None,
        timestamp: int = 0,
        headers: Headers | None = None,
    ) -> None:
        self._broker.enter("produce")
        raw_key = key.encode() if isinstance(key, str) else key
        with self._broker.lock:
            self._require_not_fenced()
            if self._transactional_id is not None and self._transaction is None:
                raise KafkaException(KafkaError(KafkaError._STATE, "produce() needs an open transaction"))  # noqa: SLF001  public in librdkafka
            if len(self._queue) >= self._limit:
                raise BufferError("Local: Queue full")
            record = Stored(
                0, raw_key, value, list(headers) if headers else None, timestamp or self._broker.clock.time_ms(), self._transaction
            )
            pending = _Pending(topic, partition, record, on_delivery)
            pending.error = self._broker.faults.take_produce_error(topic) or self._place(pending)
            pending.lost = pending.error is None and self._broker.faults.take_lost(topic)
            self._queue.append(pending)
            self._send()
            self._broker.changed.notify_all()

    def poll(self, timeout: float = -1) -> int:
        self._broker.enter("producer_poll")
        return self._report(timeout, all_of_them=False)

    def flush(self, timeout: float = -1) -> int:
        self._broker.enter("flush")
        with self._broker.lock:
            self._require_not_fenced()
        self._report(timeout, all_of_them=True)
        return len(self)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        with self._broker.lock:
            for pending in self._queue:
                if not pending.sent and pending.error is None:
                    pending.error = KafkaError(KafkaError._PURGE_QUEUE)  # noqa: SLF001  public in librdkafka

    def init_transactions(self, timeout: float = -1) -> None:
        self._broker.enter("init_transactions")
        if self._transactional_id is None:
            raise KafkaException(KafkaError(KafkaError._NOT_CONFIGURED, "transactional.id is not set"))  # noqa: SLF001  public in librdkafka
        with self._broker.lock:
            self._epoch = self._broker.take_over(self._transactional_id)

    def begin_transaction(self) -> None:
        self._broker.enter("begin_transaction")
        with self._broker.lock:
            holder = self._holder()
            if self._transaction is not None:
                raise KafkaException(KafkaError(KafkaError._STATE, "a transaction is already open"))  # noqa: SLF001  public in librdkafka
            self._transaction = holder.transaction = Transaction()

    def send_offsets_to_transaction(self, positions: list[TopicPartition], group_metadata: Any, timeout: float = -1) -> None:
        self._broker.enter("send_offsets_to_transaction")
        with self._broker.lock:
            self._holder()
            if self._transaction is None:
                raise KafkaException(KafkaError(KafkaError._STATE, "no transaction is open"))  # noqa: SLF001  public in librdkafka
            found = self._transaction.positions.setdefault(group_metadata, {})
            found.update({(each.topic, each.partition): (each.offset, each.metadata or "") for each in positions})

    def commit_transaction(self, timeout: float = -1) -> None:
        self._broker.enter("commit_transaction")
        self._report(timeout, all_of_them=True)
        with self._broker.lock:
            holder = self._holder()
            if self._transaction is None:
                raise KafkaException(KafkaError(KafkaError._STATE, "no transaction is open"))  # noqa: SLF001  public in librdkafka
            for group, positions in self._transaction.positions.items():
                self._broker.group(group).committed.update(positions)
            self._transaction = None
            self._broker.end_transaction(holder, TransactionState.COMMITTED)

    def abort_transaction(self, timeout: float = -1) -> None:
        self._broker.enter("abort_transaction")
        self.purge()
        self._report(0, all_of_them=True)
        with self._broker.lock:
            holder = self._holder()
            self._transaction = None
            self._broker.end_transaction(holder, TransactionState.ABORTED)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._broker.enter("list_topics")
        return cluster_metadata(self._broker, topic)

    def __len__(self) -> int:
        with self._broker.lock:
            return len(self._queue)

    def _place(self, pending: _Pending) -> KafkaError | None:
        """Choose the partition as murmur2_random does. Returns an error if the topic or partition does not exist."""
        state = self._broker.topics.get(pending.topic)
        if state is None:
            return KafkaError(KafkaError._UNKNOWN_TOPIC, "Local: Unknown topic")  # noqa: SLF001  public in librdkafka
        num = len(state.partitions)
        if pending.partition == _ANY_PARTITION:
            key = pending.record.key
            pending.partition = self._random.randrange(num) if key is None else (murmur2(key) & 0x7FFFFFFF) % num
        if not 0 <= pending.partition < num:
            return KafkaError(KafkaError._UNKNOWN_PARTITION, "Local: Unknown partition")  # noqa: SLF001  public in librdkafka
        return None

    def _send(self) -> None:
        """Append the records that are not held, in order."""
        for pending in self._queue:
            if not pending.sent and pending.error is None and pending.topic not in self._broker.faults.held_topics:
                if pending.topic not in self._broker.topics:
                    pending.error = KafkaError(KafkaError._UNKNOWN_TOPIC, "Local: Unknown topic")  # noqa: SLF001  public in librdkafka
                    continue
                if not pending.lost:
                    self._broker.append(pending.topic, pending.partition, pending.record)
                pending.sent = True

    def _report(self, timeout: float, *, all_of_them: bool) -> int:
        """Run delivery callbacks, without the lock; wait for something to report, or for everything."""
        until_s = None if timeout < 0 else time.monotonic() + timeout
        reported = 0
        while True:
            with self._broker.lock:
                self._send()
                settled = [pending for pending in self._queue if pending.sent or pending.error is not None]
                for pending in settled:
                    self._queue.remove(pending) if self._queue[0] is not pending else self._queue.popleft()
                finished = not self._queue if all_of_them else bool(settled)
                if not settled and not finished:
                    left = _POLL_STEP_S if until_s is None else until_s - time.monotonic()
                    if left <= 0:
                        return reported
                    self._broker.changed.wait(min(left, _POLL_STEP_S))
                    continue
            for pending in settled:
                reported += 1
                if pending.callback is not None:
                    message = pending.record.message(pending.topic, pending.partition)
                    offset = message.offset() if pending.error is None and not pending.lost else None
                    pending.callback(pending.error, replace(message, _offset=offset, _error=pending.error))
            if finished:
                return reported

    def _holder(self) -> TransactionalId:
        if self._transactional_id is None or self._epoch is None:
            raise KafkaException(KafkaError(KafkaError._STATE, "init_transactions() comes first"))  # noqa: SLF001  public in librdkafka
        self._require_not_fenced()
        return self._broker.transactional[self._transactional_id]

    def _require_not_fenced(self) -> None:
        if self._transactional_id is None or self._epoch is None:
            return
        if self._broker.transactional[self._transactional_id].epoch != self._epoch:
            raise KafkaException(
                KafkaError(KafkaError._FENCED, "Local: This instance has been fenced by a newer instance", fatal=True)  # noqa: SLF001  see above
            )
