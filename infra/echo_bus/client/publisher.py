"""Publishes records: encodes them, sets key and headers, and reports each acknowledgement or failure.

Threads: any number of callers publish; the publisher's own thread polls the client, which delivers acknowledgements. `publish` blocks only
while the client's buffer is full; the poll thread unblocks it. Callbacks run on the poll thread and must be short.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from echo_bus.client.cluster import RawMessage, RawProducer
from echo_bus.client.consumer_queries import num_partitions
from echo_bus.client.kafka_errors import kafka_error, not_delivered
from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.errors import DeadlineExceeded, DeliveryFailed, ProducerClosed, RecordTooLarge, TransportError
from echo_bus.metrics import BusMetrics
from echo_schemas.headers import Header, headers_of
from echo_schemas.records import Coordinates, Record
from echo_schemas.topics import Topic

if TYPE_CHECKING:
    from echo_bus.wire import Wire

logger = logging.getLogger(__name__)

ReceiptCallback = Callable[["Receipt"], None]
_POLL_S = 0.1
_FULL_BUFFER_WAIT_S = 0.02
_ANY_PARTITION = -1
# One acknowledgement in so many is timed, because a histogram costs as much as encoding a small record.
_TIMED_EVERY = 16


class Receipt:
    """The result of publishing one record: its coordinates, or the error. All receipts of a publisher share one lock."""

    __slots__ = ("_callbacks", "_condition", "_waiters", "error", "where")

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._waiters = 0
        self._callbacks: tuple[ReceiptCallback, ...] = ()
        self.where: Coordinates | None = None
        self.error: TransportError | None = None

    @property
    def done(self) -> bool:
        """Whether the record was acknowledged or has failed."""
        return self.where is not None or self.error is not None

    def wait(self, timeout_s: float) -> Coordinates:
        """The record's partition and offset. Raises the record's error if it failed, DeadlineExceeded if it is not settled in time."""
        with self._condition:
            self._waiters += 1
            self._condition.wait_for(lambda: self.done, timeout_s)
            self._waiters -= 1
        if self.error is not None:
            raise self.error
        if self.where is None:
            raise DeadlineExceeded(f"A record was not acknowledged within {timeout_s:g} s; it may still be.")
        return self.where

    def on_done(self, callback: ReceiptCallback) -> None:
        """Call `callback(receipt)` once, on the poll thread, or now if the receipt is settled."""
        with self._condition:
            # Add first, then look; `settle` does the reverse, so one of the two runs the callback.
            self._callbacks += (callback,)
        if self.done:
            self._run_callbacks()

    def settle(self, where: Coordinates | None, error: TransportError | None) -> None:
        """Set the result; called once, by the publisher."""
        self.where, self.error = where, error
        # Almost no receipt has a waiting thread, and then no lock is taken.
        if self._waiters:
            with self._condition:
                self._condition.notify_all()
        if self._callbacks:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        with self._condition:
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback(self)


class Publisher:
    """Publishes records of one process. Thread-safe."""

    def __init__(self, producer: RawProducer, wire: Wire, *, poll: bool = True) -> None:
        """`poll=False`: the caller polls (transactions do)."""
        self._producer = producer
        self._wire = wire
        # Looked up once, not per record.
        self._encode, self._physical, self._source = wire.codec.encode, wire.namespace.topic, wire.client_id
        self._condition = threading.Condition()
        self._failure: TransportError | None = None
        self._ended: TransportError | None = None
        self._closed = False
        self._topics: dict[str, _TopicMetrics] = {}
        self._thread = threading.Thread(target=self._poll, name=f"publisher {self._source}", daemon=True) if poll else None
        if self._thread is not None:
            self._thread.start()

    def publish(
        self,
        topic: Topic,
        record: Record,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Receipt:
        """Hand over `record`. The key is the topic's own unless given; the partition follows from the key unless given.

        Raises InvalidRecord if the record contradicts itself, RecordTooLarge, ProducerClosed, the error of an earlier failed delivery once,
        and the error of a client that has failed for good each time.
        """
        value = self._encode(record)
        all_headers = headers_of(record, source=self._source, time_ms=self._wire.clock.time_ms())
        if headers:
            all_headers.extend(headers)
        physical, key = self._physical(topic), key or topic.key_of(record)
        if self._wire.signer is not None and topic.author is not None:
            all_headers += self._wire.signer.sign(physical, [(key, value)])
        return self._produce_traced(record, physical, value, key, partition, all_headers)

    def publish_together(self, topic: Topic, records: Sequence[Record]) -> list[Receipt]:
        """As `publish`, for several records, with one signature for many. An invalid record raises before any is handed over."""
        physical, time_ms = self._physical(topic), self._wire.clock.time_ms()
        encoded = [(topic.key_of(record), self._encode(record)) for record in records]
        signatures = self._wire.signer.sign(physical, encoded) if self._wire.signer is not None and topic.author is not None else None
        receipts = []
        for number, (record, (key, value)) in enumerate(zip(records, encoded, strict=True)):
            all_headers = headers_of(record, source=self._source, time_ms=time_ms)
            if signatures is not None:
                all_headers.append(signatures[number])
            receipts.append(self._produce_traced(record, physical, value, key, None, all_headers))
        return receipts

    def publish_tombstone(self, topic: Topic, key: str) -> Receipt:
        """Delete `key` of a compacted topic."""
        return self.publish_bytes(self._physical(topic), None, key=key)

    def publish_bytes(
        self,
        physical: str,
        value: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        partition: int | None = None,
        time_ms: int = 0,
    ) -> Receipt:
        """Hand over bytes unchanged, for dead letters. `time_ms`: the record's time; 0: now."""
        if self._closed:
            raise ProducerClosed(f"Something was published to {physical} after the publisher was closed.")
        if self._ended is not None:
            # The poll thread has ended, so no acknowledgement would arrive.
            raise self._ended
        if self._failure is not None:
            self._raise_failure()
        num_bytes = 0 if value is None else len(value)
        if num_bytes > MAX_RECORD_BYTES:
            raise RecordTooLarge(
                f"A record of {num_bytes} bytes is above the {MAX_RECORD_BYTES} that every cluster accepts.",
                hint="Long data travels as a blob.",
            )
        topic_metrics = self._topics.get(physical) or self._metrics_of(physical)
        receipt = Receipt(self._condition)
        started_s = time.monotonic()

        def delivered(error: KafkaError | None, message: RawMessage) -> None:
            self._delivered(receipt, topic_metrics, started_s, error, message)

        where = _ANY_PARTITION if partition is None else partition
        while True:
            try:
                self._producer.produce(physical, value, key, where, delivered, timestamp=time_ms, headers=list(headers))
                break
            except BufferError:
                self._wait_for_room(topic_metrics)
            except KafkaException as exc:
                raise not_delivered(physical, exc.args[0]) from exc
        topic_metrics.published.inc()
        topic_metrics.num_bytes.inc(num_bytes)
        return receipt

    def flush(self, timeout_s: float) -> None:
        """Wait until all records are acknowledged. Raises DeadlineExceeded, or the error of a failed delivery."""
        left = self._producer.flush(timeout_s)
        self._raise_failure()
        if left:
            raise DeadlineExceeded(f"{left} records were not acknowledged within {timeout_s:g} s; they may still be.")

    def close(self, timeout_s: float = 10.0) -> None:
        """Flush and stop. Idempotent. Raises as `flush`, but closes the publisher in any case."""
        if self._closed:
            return
        try:
            self.flush(timeout_s)
        finally:
            self._closed = True
            if self._thread is not None:
                self._thread.join(timeout_s)

    def num_partitions(self, topic: Topic, timeout_s: float = 10.0) -> int:
        """How many partitions a topic has. Raises TopicMissing, ClusterUnreachable, NotAuthorized."""
        return num_partitions(self._producer, self._physical(topic), timeout_s)

    def _produce_traced(
        self, record: Record, physical: str, value: bytes, key: str | None, partition: int | None, headers: list[Header]
    ) -> Receipt:
        followed = None if self._wire.tracer is None else self._wire.tracer.writes(record)
        if followed is None:
            return self.publish_bytes(physical, value, key=key, partition=partition, headers=headers)
        header, written = followed
        receipt = self.publish_bytes(physical, value, key=key, partition=partition, headers=[*headers, header])
        receipt.on_done(lambda done: None if done.where is None else written())
        return receipt

    def _wait_for_room(self, topic_metrics: _TopicMetrics) -> None:
        """Block the caller while the client's buffer is full; acknowledgements free it."""
        started_s = time.monotonic()
        self._producer.poll(_FULL_BUFFER_WAIT_S)
        topic_metrics.blocked.inc(time.monotonic() - started_s)
        if self._closed:
            raise ProducerClosed("The publisher was closed while a caller waited for room in its buffer.")

    def _delivered(
        self, receipt: Receipt, topic_metrics: _TopicMetrics, started_s: float, error: KafkaError | None, message: RawMessage
    ) -> None:
        offset = message.offset()
        if error is None and offset is not None:
            if not offset % _TIMED_EVERY:
                topic_metrics.seconds.observe(time.monotonic() - started_s)
            self._settle(receipt, topic_metrics, Coordinates(partition=message.partition() or 0, offset=offset), None)
            return
        failure = not_delivered(topic_metrics.physical, error)
        self._wire.metrics.publish_failures.labels(topic_metrics.physical, "no offset" if error is None else error.name()).inc()
        logger.error("%s", failure)
        self._failure = failure
        self._settle(receipt, topic_metrics, None, failure)

    def _settle(self, receipt: Receipt, topic_metrics: _TopicMetrics, where: Coordinates | None, error: TransportError | None) -> None:
        """Settle a receipt. The next caller gets an exception of its callbacks; the thread goes on, because others wait for receipts."""
        try:
            receipt.settle(where, error)
        except Exception as exc:  # callbacks of callers may raise anything
            logger.exception("What follows an acknowledgement from %s has failed", topic_metrics.physical)
            self._failure = TransportError(f"What follows an acknowledgement from {topic_metrics.physical} has failed: {exc!r}.")
            self._failure.__cause__ = exc

    def forget_failure(self) -> None:
        """Do not raise the failed delivery: the records of a transaction that is rolled back need not arrive."""
        self._failure = None

    def _raise_failure(self) -> None:
        """Raise the newest failure that was not raised yet, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _poll(self) -> None:
        while not self._closed:
            try:
                self._producer.poll(_POLL_S)
            except (KafkaException, SystemError) as exc:
                error = kafka_error(exc)
                reason = str(exc) if error is None else error.str()
                self._failure = self._ended = DeliveryFailed(f"The producer {self._source} failed for good: {reason}.")
                logger.exception("The producer %s failed for good", self._source)
                return

    def _metrics_of(self, physical: str) -> _TopicMetrics:
        made = self._topics[physical] = _TopicMetrics(self._wire.metrics, physical)
        return made


class _TopicMetrics:
    """The labelled collectors of one topic, so that they are looked up once, not per record."""

    __slots__ = ("blocked", "num_bytes", "physical", "published", "seconds")

    def __init__(self, metrics: BusMetrics, physical: str) -> None:
        self.physical = physical
        self.published = metrics.records_published.labels(physical)
        self.num_bytes = metrics.bytes_published.labels(physical)
        self.seconds = metrics.publish_seconds.labels(physical)
        self.blocked = metrics.publish_blocked_seconds.labels(physical)
