"""Asking and being answered over topics, with Spring's header names so that other stacks can take part; and the answering half.

    who asks                                                         ReplyServer (in a worker)
    reply partition read from before the first request
    request ── kafka_correlationId, kafka_replyTopic, kafka_replyPartition ──▶ begin: new | running | answered | expired
            ◀── reply to that partition, kafka_correlationId ───────────────── answer

Delivery is at least once, so a request may come again: while it is being worked on it is passed by, afterwards it is answered from the
cache. The cache is bounded by number; what fell out is worked on again, and whoever asked passes the second answer over.

Threads: any. Nothing blocks but the publisher's full buffer.
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
"""When whoever asked stops waiting, in milliseconds since the epoch, so that a server drops what nobody waits for."""
PARTITION_STRUCT = struct.Struct(">i")
"""Spring's own form: four bytes, big-endian."""

# Spring's is 16 bytes, ours 32. It is repeated in the reply's key, header and body.
_MOST_CORRELATION_BYTES = 1_024
# Partitions may be added while we run; whoever names one that is not there makes us ask no more often than this.
_ASK_AGAIN_S = 30.0


def reply_headers(correlation: str, *, topic: str, partition: int, deadline_ms: int | None) -> tuple[tuple[str, bytes], ...]:
    """The headers of a request that wants its reply on `partition` of `topic` (a physical name) before `deadline_ms` (None: some time)."""
    headers = (
        (CORRELATION_ID, correlation.encode()),
        (REPLY_TOPIC, topic.encode()),
        (REPLY_PARTITION, PARTITION_STRUCT.pack(partition)),
    )
    return headers if deadline_ms is None else (*headers, (DEADLINE_MS, str(deadline_ms).encode()))


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where a reply goes, and until when anybody waits for it (None: for ever). `correlation` is any bytes, and comes back as it is."""

    correlation: bytes
    partition: int
    deadline_ms: int | None

    @property
    def correlation_text(self) -> str:
        """The correlation id for a record and its key: itself where it is text, else in hexadecimal digits."""
        try:
            return self.correlation.decode()
        except UnicodeDecodeError:
            return self.correlation.hex()


class Begin(Enum):
    """What to do with a request."""

    NEW = "new"
    """Work on it, then `answer` or `abandon`."""
    RUNNING = "running"
    """It is being worked on; do nothing."""
    ANSWERED = "answered"
    """The answer was sent again; do nothing."""
    EXPIRED = "expired"
    """Nobody waits any more; do nothing, or answer so."""


def address_of(message: Message, *, reply_topic: str) -> ReplyAddress | None:
    """Where the sender of `message` wants its reply; None if it wants none. `reply_topic` is the physical name that we may write to.

    Raises InvalidRecord if the headers contradict themselves.
    """
    headers = message.headers
    correlation = headers.get(CORRELATION_ID)
    if correlation is None:
        return None
    if not 0 < len(correlation) <= _MOST_CORRELATION_BYTES:
        raise InvalidRecord(
            InvalidReason.LENGTH_MISMATCH, f"{CORRELATION_ID} has {len(correlation)} bytes; it has 1 to {_MOST_CORRELATION_BYTES}."
        )
    if headers.get(REPLY_TOPIC, b"").decode(errors="replace") != reply_topic:
        raise InvalidRecord(
            InvalidReason.INCONSISTENT, f"{REPLY_TOPIC} is {headers.get(REPLY_TOPIC)!r}; replies go to {reply_topic!r} and nowhere else."
        )
    packed, deadline, deadline_ms = headers.get(REPLY_PARTITION, b""), headers.get(DEADLINE_MS), number_of(headers.get(DEADLINE_MS))
    if len(packed) != PARTITION_STRUCT.size:
        raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, f"{REPLY_PARTITION} has {len(packed)} bytes; Spring's form has four.")
    (partition,) = PARTITION_STRUCT.unpack(packed)
    if partition < 0:
        raise InvalidRecord(InvalidReason.NEGATIVE_NUMBER, f"{REPLY_PARTITION} is {partition}.")
    if deadline is not None and deadline_ms is None:
        raise InvalidRecord(InvalidReason.INCONSISTENT, f"{DEADLINE_MS} is not a number of milliseconds: {deadline!r}.")
    return ReplyAddress(correlation, partition, deadline_ms)


class ReplyServer:
    """Remembers what it was asked and what it answered."""

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
        """See `address_of`. Raises InvalidRecord also for a partition that the reply topic does not have.

        May block for a look at the cluster, twice a minute at most. Raises ClusterUnreachable, TopicMissing, NotAuthorized.
        """
        address = address_of(message, reply_topic=self._physical)
        if address is not None and address.partition >= self._partitions_for(address.partition):
            raise InvalidRecord(
                InvalidReason.INCONSISTENT,
                f"{REPLY_PARTITION} is {address.partition}; {self._physical} has the partitions 0 to {self._num_partitions - 1}.",
            )
        return address

    def _partitions_for(self, partition: int) -> int:
        """How many partitions the reply topic has; asked for when `partition` is not among those that we know."""
        now_s = self._clock.monotonic_s()
        if partition >= self._num_partitions and now_s - self._asked_s >= _ASK_AGAIN_S:
            self._num_partitions, self._asked_s = self._publisher.num_partitions(self._topic), now_s
        return self._num_partitions

    def begin(self, address: ReplyAddress) -> Begin:
        """Ask before the work starts. A repeated request whose answer is known is answered here, to the place it asks for now."""
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
        """Send the answer and remember it. The receipt says when the request's offset may be committed.

        Raises InvalidRecord, RecordTooLarge or TransportError; the request may then be begun again.
        """
        try:
            receipt = self._send(address, reply)
        except Exception:  # whatever it is, nothing was sent
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
        """The work was given up without an answer; the request may be begun again."""
        with self._lock:
            self._running.discard(address.correlation)

    def _send(self, address: ReplyAddress, reply: RolloutReply) -> Receipt:
        return self._publisher.publish(
            self._topic,
            reply,
            partition=address.partition,
            headers=((CORRELATION_ID, address.correlation),),
        )
