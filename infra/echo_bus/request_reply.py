"""Asking and being answered over topics, with Spring's header names so that other stacks can take part.

    Requester                                                        ReplyServer (in a worker)
    reply partition assigned, positioned at its end
    request ── kafka_correlationId, kafka_replyTopic, kafka_replyPartition ──▶ begin: new | running | answered | expired
    pending.wait ◀── reply to that partition, kafka_correlationId ──────────── answer

The client is `Requester`; the server's half is in request_reply_server.py. A reply cannot be missed: the partition is read from before the
first request is sent. A reply that nobody waits for (late, repeated, somebody else's) is an orphan: counted, never an error.

Threads: any thread sends and waits; one thread of the requester's own reads replies.
"""

from __future__ import annotations

import logging
import struct
import threading
import uuid

from echo_bus.clock import Clock
from echo_bus.errors import DeadlineExceeded, ProducerClosed
from echo_bus.message import Message
from echo_bus.metrics import BusMetrics
from echo_bus.publisher import Publisher, Receipt
from echo_bus.reader import From, LogReader
from echo_schemas.naming import Namespace
from echo_schemas.records import Record, RolloutReply
from echo_schemas.topics import Topic

logger = logging.getLogger(__name__)

CORRELATION_ID = "kafka_correlationId"
REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"
DEADLINE_MS = "echo-deadline-ms"
"""When the requester stops waiting, in milliseconds since the epoch, so that a server drops what nobody waits for."""
PARTITION_STRUCT = struct.Struct(">i")
"""Spring's own form: four bytes, big-endian."""

_READ_S = 0.1


def reply_headers(correlation: str, *, topic: str, partition: int, deadline_ms: int | None) -> tuple[tuple[str, bytes], ...]:
    """The headers of a request that wants its reply on `partition` of `topic` (a physical name) before `deadline_ms` (None: some time)."""
    headers = (
        (CORRELATION_ID, correlation.encode()),
        (REPLY_TOPIC, topic.encode()),
        (REPLY_PARTITION, PARTITION_STRUCT.pack(partition)),
    )
    return headers if deadline_ms is None else (*headers, (DEADLINE_MS, str(deadline_ms).encode()))


class PendingReply:
    """One request on its way."""

    def __init__(self, requester: Requester, correlation: str, *, deadline_ms: int, sent_s: float) -> None:
        self.correlation = correlation
        self.deadline_ms = deadline_ms
        self.sent_s = sent_s
        self.reply: RolloutReply | None = None
        self.receipt: Receipt | None = None
        self._requester = requester

    def wait(self) -> RolloutReply:
        """The reply. Raises DeadlineExceeded at the request's deadline, DeliveryFailed if the request was not written."""
        return self._requester.wait(self)

    def cancel(self) -> None:
        """Wait no more; a reply that still comes is an orphan."""
        self._requester.forget(self)


class Requester:
    """Sends requests and hands their replies out. Thread-safe; `close` it, which closes the reader too."""

    def __init__(
        self,
        publisher: Publisher,
        reader: LogReader,
        *,
        namespace: Namespace,
        reply_topic: Topic,
        reply_partition: int,
        metrics: BusMetrics,
        clock: Clock,
        max_pending: int = 10_000,
    ) -> None:
        """`reader` reads `reply_topic` alone; `reply_partition` is this requester's own."""
        self._publisher = publisher
        self._reader = reader
        self._reply_topic = reply_topic
        self._physical = namespace.topic(reply_topic)
        self._partition = reply_partition
        self._metrics = metrics
        self._clock = clock
        self._max_pending = max_pending
        self._changed = threading.Condition()
        self._pending: dict[str, PendingReply] = {}
        self._error: BaseException | None = None
        self._started = self._closed = False
        self._thread = threading.Thread(target=self._read, name="replies", daemon=True)

    def start(self) -> None:
        """Take the place at the end of the reply partition; only then may requests be sent."""
        self._reader.start(otherwise=From.END)
        self._started = True
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Requests without a reply."""
        return len(self._pending)

    def send(
        self, topic: Topic, request: Record, *, deadline_ms: int, partition: int | None = None, correlation: str | None = None
    ) -> PendingReply:
        """Send `request`. Blocks while `max_pending` requests wait for replies, at most until the deadline.

        Raises DeadlineExceeded if there is no room, ProducerClosed before `start` and after `close`.
        """
        correlation = correlation or uuid.uuid4().hex
        pending = PendingReply(self, correlation, deadline_ms=deadline_ms, sent_s=self._clock.monotonic_s())
        with self._changed:
            if not self._started or self._closed:
                raise ProducerClosed("Requests are sent between `start` and `close` of a requester.")
            if not self._changed.wait_for(lambda: len(self._pending) < self._max_pending, self._remaining_s(deadline_ms)):
                raise DeadlineExceeded(f"{self._max_pending} requests already wait for replies.")
            self._raise_error()
            self._pending[correlation] = pending
        headers = reply_headers(correlation, topic=self._physical, partition=self._partition, deadline_ms=deadline_ms)
        try:
            pending.receipt = self._publisher.publish(topic, request, partition=partition, headers=headers)
        except Exception:  # whatever it is, nothing was sent, so nothing is waited for
            self.forget(pending)
            raise
        self._metrics.requests.labels(topic.name).inc()
        pending.receipt.on_done(self._wake_if_failed)
        return pending

    def wait(self, pending: PendingReply) -> RolloutReply:
        """See `PendingReply.wait`."""

        def is_over() -> bool:
            failed = pending.receipt is not None and pending.receipt.error is not None
            return pending.reply is not None or self._error is not None or failed

        with self._changed:
            self._changed.wait_for(is_over, self._remaining_s(pending.deadline_ms))
            self._pending.pop(pending.correlation, None)
            self._changed.notify_all()
            if pending.reply is not None:
                return pending.reply
            self._raise_error()
        if pending.receipt is not None and pending.receipt.error is not None:
            raise pending.receipt.error
        self._metrics.replies.labels("expired").inc()
        raise DeadlineExceeded(f"No reply to {pending.correlation} came before its deadline.")

    def forget(self, pending: PendingReply) -> None:
        """See `PendingReply.cancel`."""
        with self._changed:
            self._pending.pop(pending.correlation, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading replies. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._thread.join()
        self._reader.close()

    def _read(self) -> None:
        try:
            while not self._closed:
                for message in self._reader.read(timeout_s=_READ_S):
                    # Other requesters have partitions of their own; what comes there is not ours to count.
                    if message.partition == self._partition:
                        self._take(message)
        except BaseException as exc:  # the edge of the thread: every waiter gets it
            logger.exception("Reading replies has failed")
            with self._changed:
                self._error = exc
                self._changed.notify_all()

    def _take(self, message: Message) -> None:
        """Give a reply to its waiter; the first one counts."""
        correlation = message.headers.get(CORRELATION_ID, b"").decode(errors="replace") or message.key or ""
        reply = message.record
        with self._changed:
            pending = self._pending.get(correlation)
            if pending is None or not isinstance(reply, RolloutReply) or pending.reply is not None:
                self._metrics.replies.labels("orphan" if pending is None else "duplicate").inc()
                return
            pending.reply = reply
            self._changed.notify_all()
        self._metrics.replies.labels("accepted").inc()
        self._metrics.request_seconds.labels(self._reply_topic.name).observe(self._clock.monotonic_s() - pending.sent_s)

    def _wake_if_failed(self, receipt: Receipt) -> None:
        if receipt.error is not None:
            with self._changed:
                self._changed.notify_all()

    def _remaining_s(self, deadline_ms: int) -> float:
        return max(0.0, (deadline_ms - self._clock.time_ms()) / 1000)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
