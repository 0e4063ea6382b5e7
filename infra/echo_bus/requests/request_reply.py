"""Requests and replies over topics, with Spring's header names so that other stacks can take part; and the server's side of it.

    requester                                                        ReplyServer (in a worker)
    reply partition read from before the first request
    request ── kafka_correlationId, kafka_replyTopic, kafka_replyPartition ──▶ begin: new | running | answered | expired
            ◀── reply to that partition, kafka_correlationId ───────────────── answer

Delivery is at least once, so a request may come again. While the server works on it, the repetition is ignored; afterwards the server sends
the cached answer. The cache is bounded: a request whose answer was dropped is worked on again, and the requester ignores the second answer.

Threads: any. Only the publisher's full buffer blocks.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from echo_bus.client.publisher import Publisher, Receipt
from echo_bus.message import Message
from echo_bus.wire import Wire
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.headers import number_of
from echo_schemas.records import RolloutReply
from echo_schemas.topics import Topic

CORRELATION_ID = "kafka_correlationId"
REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"
DEADLINE_MS = "echo-deadline-ms"
"""When the requester stops waiting, in milliseconds since the epoch; the server drops the request after that."""
PARTITION_STRUCT = struct.Struct(">i")
"""Spring's own form: four bytes, big-endian."""

# Spring's is 16 bytes, ours 32. It is repeated in the reply's key, header and body.
_MOST_CORRELATION_BYTES = 1_024
# Partitions may be added while this runs; a request with an unknown partition causes a look-up at most this often.
_ASK_AGAIN_S = 30.0


def reply_headers(correlation: str, *, topic: str, partition: int, deadline_ms: int | None) -> tuple[tuple[str, bytes], ...]:
    """The headers of a request for a reply on `partition` of `topic` (a physical name) before `deadline_ms` (None: no limit)."""
    headers = (
        (CORRELATION_ID, correlation.encode()),
        (REPLY_TOPIC, topic.encode()),
        (REPLY_PARTITION, PARTITION_STRUCT.pack(partition)),
    )
    return headers if deadline_ms is None else (*headers, (DEADLINE_MS, str(deadline_ms).encode()))


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where a reply goes, and until when the requester waits for it (None: for ever). `correlation`: any bytes, returned unchanged."""

    correlation: bytes
    partition: int
    deadline_ms: int | None

    @property
    def correlation_text(self) -> str:
        """The correlation id for a record and its key: as it is if it is UTF-8, else in hexadecimal digits."""
        try:
            return self.correlation.decode()
        except UnicodeDecodeError:
            return self.correlation.hex()


class Begin(Enum):
    """What to do with a request."""

    NEW = "new"
    """Work on it, then `answer` or `abandon`."""
    RUNNING = "running"
    """The server works on it; do nothing."""
    ANSWERED = "answered"
    """The answer was sent again; do nothing."""
    EXPIRED = "expired"
    """The requester has stopped waiting; do nothing, or answer that it expired."""


class ReplyServer:
    """Tracks running requests and caches answers."""

    def __init__(self, publisher: Publisher, reply_topic: Topic, wire: Wire, *, max_cached: int = 10_000) -> None:
        self._publisher = publisher
        self._topic = reply_topic
        self._physical = wire.namespace.topic(reply_topic)
        self._metrics, self._clock = wire.metrics, wire.clock
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._running: set[bytes] = set()
        self._answers: OrderedDict[bytes, RolloutReply] = OrderedDict()
        self._num_partitions = 0
        self._asked_s = -math.inf

    def address_of(self, message: Message) -> ReplyAddress | None:
        """Where the sender of `message` wants its reply; None if it wants none.

        Raises InvalidRecord if the headers contradict themselves or name another topic or an unknown partition. May ask the cluster and
        block, twice a minute at most. Raises ClusterUnreachable, TopicMissing, NotAuthorized.
        """
        headers = message.headers
        correlation = headers.get(CORRELATION_ID)
        if correlation is None:
            return None
        if not 0 < len(correlation) <= _MOST_CORRELATION_BYTES:
            raise InvalidRecord(
                InvalidReason.LENGTH_MISMATCH, f"{CORRELATION_ID} has {len(correlation)} bytes; it has 1 to {_MOST_CORRELATION_BYTES}."
            )
        if headers.get(REPLY_TOPIC, b"").decode(errors="replace") != self._physical:
            raise InvalidRecord(
                InvalidReason.INCONSISTENT,
                f"{REPLY_TOPIC} is {headers.get(REPLY_TOPIC)!r}; replies go to {self._physical!r} and nowhere else.",
            )
        packed, deadline, deadline_ms = headers.get(REPLY_PARTITION, b""), headers.get(DEADLINE_MS), number_of(headers.get(DEADLINE_MS))
        if len(packed) != PARTITION_STRUCT.size:
            raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, f"{REPLY_PARTITION} has {len(packed)} bytes; Spring's form has four.")
        (partition,) = PARTITION_STRUCT.unpack(packed)
        if partition < 0:
            raise InvalidRecord(InvalidReason.NEGATIVE_NUMBER, f"{REPLY_PARTITION} is {partition}.")
        if deadline is not None and deadline_ms is None:
            raise InvalidRecord(InvalidReason.INCONSISTENT, f"{DEADLINE_MS} is not a number of milliseconds: {deadline!r}.")
        if partition >= self._partitions_for(partition):
            raise InvalidRecord(
                InvalidReason.INCONSISTENT,
                f"{REPLY_PARTITION} is {partition}; {self._physical} has the partitions 0 to {self._num_partitions - 1}.",
            )
        return ReplyAddress(correlation, partition, deadline_ms)

    def _partitions_for(self, partition: int) -> int:
        """The reply topic's number of partitions; asks the cluster if `partition` is not among the known ones."""
        now_s = self._clock.monotonic_s()
        if partition >= self._num_partitions and now_s - self._asked_s >= _ASK_AGAIN_S:
            self._num_partitions, self._asked_s = self._publisher.num_partitions(self._topic), now_s
        return self._num_partitions

    def begin(self, address: ReplyAddress) -> Begin:
        """Call before the work starts. Sends a cached answer at once, to the address of the repeated request."""
        with self._lock:
            if address.correlation in self._running:
                return Begin.RUNNING
            answer = self._answers.get(address.correlation)
            if answer is None:
                if address.deadline_ms is not None and self._clock.time_ms() >= address.deadline_ms:
                    return Begin.EXPIRED
                self._running.add(address.correlation)
                return Begin.NEW
        self._metrics.replies_cached.inc()
        self._send(address, answer)
        return Begin.ANSWERED

    def answer(self, address: ReplyAddress, reply: RolloutReply) -> Receipt:
        """Send and cache the answer. Commit the request's offset after the receipt.

        Raises InvalidRecord, RecordTooLarge or TransportError; the request may then be begun again.
        """
        try:
            receipt = self._send(address, reply)
        except Exception:  # after any error nothing was sent
            self.abandon(address)
            raise
        with self._lock:
            self._running.discard(address.correlation)
            self._answers[address.correlation] = reply
            self._answers.move_to_end(address.correlation)
            while len(self._answers) > self._max_cached:
                self._answers.popitem(last=False)
        return receipt

    def abandon(self, address: ReplyAddress) -> None:
        """The work ended without an answer; the request may be begun again."""
        with self._lock:
            self._running.discard(address.correlation)

    def _send(self, address: ReplyAddress, reply: RolloutReply) -> Receipt:
        return self._publisher.publish(
            self._topic,
            reply,
            partition=address.partition,
            headers=((CORRELATION_ID, address.correlation),),
        )
