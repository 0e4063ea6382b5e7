"""Request and reply over topics, with Spring's header names.

The requester owns one partition of the reply topic: assigned, never shared by a group, and positioned before its first request is sent, so
that no reply can be missed. Deadlines are absolute. A reply that nobody waits for is counted, not an error. A server answers a repeated
request from its cache, so that a request is acted on at most once while the cache remembers it.

Threads: the requester's own thread reads replies; callers block in `PendingReply.wait`.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from echo_bus.clock import Clock, Deadline
from echo_bus.errors import DeadlineExceeded, TransportError
from echo_bus.message import Message
from echo_bus.metrics import BusMetrics
from echo_bus.publisher import Publisher, Receipt
from echo_bus.reader import LogReader
from echo_schemas.naming import Namespace
from echo_schemas.records import RolloutReply, RolloutRequest
from echo_schemas.topics import REPLIES, REQUESTS

logger = logging.getLogger(__name__)

CORRELATION_ID = "kafka_correlationId"
REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"
DEADLINE = "echo-deadline"
_PARTITION = struct.Struct(">i")
_READ_S = 0.1
_WAIT_STEP_S = 0.5


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where a reply goes, as the request's headers say."""

    topic: str
    partition: int
    correlation: str

    def headers(self, deadline_ms: int | None) -> list[tuple[str, bytes]]:
        """The headers of a request that wants its reply here."""
        headers = [
            (CORRELATION_ID, self.correlation.encode()),
            (REPLY_TOPIC, self.topic.encode()),
            (REPLY_PARTITION, _PARTITION.pack(self.partition)),
        ]
        return headers if deadline_ms is None else [*headers, (DEADLINE, str(deadline_ms).encode())]


def reply_address(headers: Mapping[str, bytes]) -> ReplyAddress | None:
    """The address in a request's headers; None if no reply is wanted or the headers are not whole."""
    partition = headers.get(REPLY_PARTITION, b"")
    if CORRELATION_ID not in headers or REPLY_TOPIC not in headers or len(partition) != _PARTITION.size:
        return None
    return ReplyAddress(
        headers[REPLY_TOPIC].decode(errors="replace"),
        int(_PARTITION.unpack(partition)[0]),
        headers[CORRELATION_ID].decode(errors="replace"),
    )


class PendingReply:
    """A request under way."""

    def __init__(self, request: RolloutRequest, changed: threading.Condition) -> None:
        self.request = request
        self._changed = changed
        self._reply: RolloutReply | None = None
        self._failure: TransportError | None = None

    @property
    def reply(self) -> RolloutReply | None:
        """The reply, if it is there."""
        return self._reply

    def wait(self, deadline: Deadline) -> RolloutReply:
        """The reply. Raises DeadlineExceeded; the request may still be acted on, and its late reply is then an orphan."""
        with self._changed:
            while self._reply is None:
                if self._failure is not None:
                    raise self._failure
                if deadline.expired():
                    raise DeadlineExceeded(f"No reply to {self.request.correlation} ({self.request.group_id}) by its deadline.")
                self._changed.wait(min(deadline.remaining_s(), _WAIT_STEP_S))
            return self._reply


class Requester:
    """Sends requests and matches replies. Thread-safe."""

    def __init__(
        self,
        publisher: Publisher,
        replies: LogReader,
        partition: int,
        *,
        namespace: Namespace,
        metrics: BusMetrics,
        clock: Clock,
        max_pending: int = 10_000,
    ) -> None:
        """`replies` reads `partition` of the reply topic from its end; it belongs to the requester from now on."""
        self._publisher = publisher
        self._replies = replies
        self._partition = partition
        self._namespace = namespace
        self._metrics = metrics
        self._clock = clock
        self._max_pending = max_pending
        self._changed = threading.Condition()
        self._pending: dict[str, tuple[PendingReply, float]] = {}
        self._closed = False
        self._positioned = False
        self._failure: TransportError | None = None
        self._thread = threading.Thread(target=self._read, name="replies", daemon=True)
        self._thread.start()

    def send(self, request: RolloutRequest, *, partition: int | None = None, timeout_s: float = 10.0) -> PendingReply:
        """Publish `request`, whose `correlation` is set and not under way, and expect its reply.

        Blocks until the reply partition is positioned (the first time), and while too many are pending. Raises DeadlineExceeded,
        ValueError for a request without a correlation or one that is under way.
        """
        correlation = request.correlation
        if not correlation:
            message = "A request that wants a reply carries a correlation id."
            raise ValueError(message)
        deadline = Deadline.after(timeout_s, self._clock)
        with self._changed:
            while not self._positioned or len(self._pending) >= self._max_pending:
                if self._failure is not None:
                    raise self._failure
                if deadline.expired():
                    raise DeadlineExceeded(
                        "Waited in vain to send: the reply partition is not positioned, or too many requests are pending."
                    )
                self._changed.wait(min(deadline.remaining_s(), _WAIT_STEP_S))
            if correlation in self._pending:
                raise ValueError(f"A request with the correlation id {correlation} is under way.")
            pending = PendingReply(request, self._changed)
            self._pending[correlation] = (pending, self._clock.monotonic_s())
        address = ReplyAddress(self._namespace.topic(REPLIES), self._partition, correlation)
        self._publisher.publish(REQUESTS, request, partition=partition, headers=address.headers(request.deadline_ms))
        self._metrics.requests.labels(REQUESTS.name).inc()
        return pending

    def forget(self, pending: PendingReply) -> None:
        """Expect no reply any more; one that comes is an orphan."""
        with self._changed:
            self._pending.pop(pending.request.correlation or "", None)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading replies. Idempotent."""
        self._closed = True
        self._thread.join()
        self._replies.close()

    def _read(self) -> None:
        while not self._closed:
            try:
                messages = self._replies.read(_READ_S)
            except TransportError as exc:
                logger.error("Replies can no longer be read: %s", exc)  # noqa: TRY400  the traceback goes with the error to whoever waits
                with self._changed:
                    self._failure = exc
                    for pending, _ in self._pending.values():
                        pending._failure = exc  # noqa: SLF001  a part of this class in all but name
                    self._changed.notify_all()
                return
            with self._changed:
                # Its end was seen: from here on nothing can be missed.
                self._positioned = self._positioned or self._replies.caught_up()
                for message in messages:
                    if isinstance(message, Message) and isinstance(message.record, RolloutReply):
                        self._match(message.record)
                self._changed.notify_all()

    def _match(self, reply: RolloutReply) -> None:
        pending, sent_s = self._pending.pop(reply.correlation, (None, 0.0))
        if pending is None:
            self._metrics.replies.labels("orphan").inc()
            return
        pending._reply = reply  # noqa: SLF001  a part of this class in all but name
        self._metrics.replies.labels("accepted").inc()
        self._metrics.request_seconds.labels(REQUESTS.name).observe(self._clock.monotonic_s() - sent_s)


class Responder:
    """Answers requests, each correlation id once; a repeated one gets the same answer again. Used by one thread."""

    def __init__(self, publisher: Publisher, *, namespace: Namespace, metrics: BusMetrics, clock: Clock, cache_size: int = 10_000) -> None:
        self._publisher = publisher
        self._namespace = namespace
        self._metrics = metrics
        self._clock = clock
        self._cache: OrderedDict[str, RolloutReply] = OrderedDict()
        self._cache_size = cache_size

    def is_expired(self, message: Message) -> bool:
        """Whether nobody waits for the answer any more: the absolute deadline in the headers has passed."""
        text = message.headers.get(DEADLINE, b"")
        return text.isdigit() and self._clock.time_ms() > int(text)

    def answer_again(self, message: Message) -> Receipt | None:
        """If this request was answered before, send the same reply to wherever it asks now; None if it is new."""
        address = reply_address(message.headers)
        known = self._cache.get(address.correlation) if address is not None else None
        if address is None or known is None:
            return None
        self._metrics.replies_cached.inc()
        return self._send(address, known)

    def answer(self, message: Message, reply: RolloutReply) -> Receipt | None:
        """Remember and send `reply`; None if the request wants none."""
        address = reply_address(message.headers)
        if address is None:
            return None
        self._cache[address.correlation] = reply
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return self._send(address, reply)

    def _send(self, address: ReplyAddress, reply: RolloutReply) -> Receipt | None:
        if address.topic != self._namespace.topic(REPLIES):
            logger.warning("A request wants its reply on %s, which is not this namespace's; it gets none", address.topic)
            return None
        return self._publisher.publish(REPLIES, reply, partition=address.partition)
