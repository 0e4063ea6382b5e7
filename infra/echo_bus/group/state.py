"""State that the poll thread and the worker thread of a consumer loop share: partitions, batches handed over, work in flight.

    poll thread ──FetchedBatch, Reopened──▶ Handover ──▶ worker thread ──handler──▶ in flight ──Completion.done──▶ tracker
         ▲──────────────Pause, Resume requests────────────┘                              ▲ any thread

The poll thread creates and closes partitions and counts the messages that it hands over. The worker counts the messages that it takes and
decides about pauses. Each counter has one writer, so the hot path takes no lock.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from echo_bus.client.cluster import RawMessage
from echo_bus.group.offsets import OffsetTracker
from echo_bus.metrics import BusMetrics
from echo_schemas.errors import UserError
from echo_schemas.topics import Topic

PartitionKey = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """The bounds of one consumer loop. Messages in memory: the hand-over, plus those in flight, plus for each partition those that wait for
    a busy handler, plus librdkafka's own queue."""

    max_queued_messages: int = 1_000
    max_queued_bytes: int = 32_000_000
    max_in_flight: int = 1_000
    # Larger batches and longer queues are slower: waiting messages fall out of the processor's cache.
    batch_size: int = 100
    busy_retry_s: float = 0.05
    # Of one partition, behind the one for which the handler is busy.
    max_waiting_messages: int = 64
    max_waiting_bytes: int = 1_000_000
    # Short, because the lag of `requests` counts as outstanding work.
    commit_interval_s: float = 0.2
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.max_queued_messages, self.max_queued_bytes, self.max_in_flight, self.batch_size) < 1:
            raise UserError(f"These limits leave no room for a message: {self}.", hint="Each of them must be at least 1.")


class InFlight:
    """Messages accepted and not yet done, over all partitions. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.count = 0

    def add(self) -> None:
        with self._condition:
            self.count += 1

    def subtract(self, num_done: int = 1) -> None:
        """`num_done` fewer; wakes `wait_below`."""
        with self._condition:
            self.count -= num_done
            self._condition.notify_all()

    def wait_below(self, limit: int, timeout_s: float) -> bool:
        """Wait until fewer than `limit` are in flight; False at the time-out."""
        with self._condition:
            return self._condition.wait_for(lambda: self.count < limit, timeout_s)


class TopicCounters:
    """The labelled collectors of one topic, so that the hot path need not look them up."""

    __slots__ = ("accepted", "assigned", "busy", "bytes", "in_flight", "paused", "read")

    def __init__(self, metrics: BusMetrics, physical: str) -> None:
        self.read = metrics.records_read.labels(physical)
        self.bytes = metrics.bytes_read.labels(physical)
        self.accepted = metrics.records_accepted.labels(physical)
        self.busy = metrics.records_busy.labels(physical)
        self.paused = metrics.partitions_paused.labels(physical)
        self.assigned = metrics.partitions_assigned.labels(physical)
        self.in_flight = metrics.records_in_flight.labels(physical)


def count_read(topics: Mapping[str, TopicCounters], messages: Sequence[RawMessage]) -> int:
    """Count what was read by topic; returns its bytes."""
    if len(topics) == 1:
        (counters,) = topics.values()
        num_bytes = sum(map(len, messages))
        counters.read.inc(len(messages))
        counters.bytes.inc(num_bytes)
        return num_bytes
    total = 0
    for raw in messages:
        counters, num_bytes = topics[raw.topic() or ""], len(raw)
        counters.read.inc()
        counters.bytes.inc(num_bytes)
        total += num_bytes
    return total


class PartitionState:
    """One assigned partition, from assignment to revocation. A partition that is assigned again gets a new state."""

    __slots__ = (
        "closed", "counters", "is_busy", "key", "paused", "requested", "retry_at_s", "skipping", "topic", "tracker", "waiting",
        "waiting_bytes",
    )  # fmt: skip

    def __init__(self, key: PartitionKey, topic: Topic, counters: TopicCounters, in_flight: InFlight) -> None:
        self.key = key
        self.topic = topic
        self.counters = counters
        self.tracker = OffsetTracker(on_release=in_flight.subtract)
        self.closed = False
        """The group gave the partition to another member. Set by the poll thread."""
        self.is_busy = False
        """The handler was busy for the first of `waiting`. These four are set by the worker."""
        self.waiting: deque[RawMessage] = deque()
        """The message for which the handler was busy, and those behind it."""
        self.waiting_bytes = 0
        self.retry_at_s = 0.0
        self.skipping = False
        """Skip messages that come: they are fetched again after those that wait. Set by the worker."""
        self.paused = False
        """Paused because too many messages wait. Set by the poll thread."""
        self.requested: tuple[int, str] | None = None
        """The last offset sent to be committed, and its note. Set by the poll thread."""


Assignment = Mapping[PartitionKey, PartitionState]


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """Messages as the client returned them, with the assignment at that moment."""

    assignment: Assignment
    messages: list[RawMessage]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """The client was moved to the message after the busy one; later messages in the queue are new."""

    state: PartitionState


class Signal(Enum):
    """Items of the hand-over without content."""

    ROOM = "room"
    """A message in flight is done, so the handler may accept one for which it was busy."""
    STOP = "stop"
    """The last item."""


Item = FetchedBatch | Reopened | Signal


class Handover:
    """The queue between the threads, bounded by messages and bytes: the poll thread asks `room` before it fetches."""

    def __init__(self, *, max_messages: int, max_bytes: int) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._given = self._given_bytes = 0
        self._taken = self._taken_bytes = 0
        self._waiting = False
        self._room = threading.Condition()

    @property
    def num_messages(self) -> int:
        """Messages handed over and not yet processed."""
        return self._given - self._taken

    @property
    def num_bytes(self) -> int:
        return self._given_bytes - self._taken_bytes

    def room(self) -> int:
        """How many messages may be fetched now; 0 when either bound is reached."""
        return max(0, self._max_messages - self.num_messages) if self.num_bytes < self._max_bytes else 0

    def is_half_empty(self) -> bool:
        """Whether enough messages are processed to fetch again."""
        return self.num_messages * 2 <= self._max_messages and self.num_bytes * 2 <= self._max_bytes

    def wait_for_room(self, timeout_s: float) -> bool:
        """Poll thread: wait until there is room; False at the time-out."""
        with self._room:
            self._waiting = True
            try:
                return self._room.wait_for(lambda: self.room() > 0, timeout_s)
            finally:
                self._waiting = False

    def give(self, item: Item) -> None:
        """Poll thread, or any thread for a `Signal`: hand over. Never blocks."""
        if isinstance(item, FetchedBatch):
            self._given += len(item.messages)
            self._given_bytes += item.num_bytes
        self._queue.put(item)

    def take(self, timeout_s: float | None) -> Item | None:
        """Worker: the next item; None at the time-out. `finished` must follow for a batch."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def finished(self, batch: FetchedBatch) -> None:
        """Worker: every message of the batch was processed or skipped."""
        self._taken += len(batch.messages)
        self._taken_bytes += batch.num_bytes
        if self._waiting:
            with self._room:
                self._room.notify()
