"""Reading a log without a group: every partition of some topics, from positions that the caller keeps.

The caller's thread does everything: `read` fetches, decodes and returns. There is no background thread, and nothing is committed. Use one
reader from one thread.

A position is the next offset to read, by (logical topic, partition). It also moves past offsets that no reader gets (transaction markers,
aborted records), so that a reader knows when it is at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from confluent_kafka import OFFSET_END, KafkaError, TopicPartition

from echo_bus.client.cluster import Cluster, RawMessage
from echo_bus.client.consumer_queries import end_offsets, num_partitions, offsets_at, watermarks
from echo_bus.client.kafka_errors import END_OF_PARTITION, check_error, translated
from echo_bus.client.profiles import READER, WATCHER, Properties
from echo_bus.client.publisher import Receipt
from echo_bus.clock import Deadline
from echo_bus.dead_letter_budget import DeadLetterBudget, DeadLetterLimits
from echo_bus.errors import ClusterUnreachable, DeadlineExceeded, OffsetLost, TopicMissing
from echo_bus.message import Message
from echo_bus.reading.decoding import Decoder, IgnoredReason
from echo_bus.reading.reading_note import ReadingNote
from echo_bus.wire import Wire
from echo_schemas.errors import InvalidRecord
from echo_schemas.topics import Topic

logger = logging.getLogger(__name__)

T = TypeVar("T")

Place = tuple[str, int]
"""(logical topic, partition)."""
OnInvalid = Callable[[RawMessage, Topic, InvalidRecord, bool], Receipt | None]
"""Gets a message that cannot be read, and whether it is within the budget. `read` waits for the receipt, if it returns one."""
Check = Callable[[Message], object]
"""A reader's own check of a decoded message; raises InvalidRecord, which counts like an unreadable message."""

# Small: in a large batch the decoded records fall out of the processor's cache, which costs a fifth of the speed.
_BATCH = 100
_STEP_S = 0.5
# For the question where a partition begins, while the reader's other partitions wait.
_LOOK_BACK_S = 2.0
# The producers' delivery time-out.
_ACKNOWLEDGED_S = 120.0


class From(Enum):
    """Where to start in partitions for which no position is given."""

    BEGINNING = "beginning"
    END = "end"


class Isolation(Enum):
    """Whether the reader sees records of transactions that did not commit."""

    COMMITTED = "read_committed"
    UNCOMMITTED = "read_uncommitted"


class LogReader:
    """Reads all partitions of some topics. Not thread-safe; `close` it."""

    def __init__(
        self,
        cluster: Cluster,
        wire: Wire,
        topics: Sequence[Topic],
        *,
        isolation: Isolation = Isolation.COMMITTED,
        on_invalid: OnInvalid | None = None,
        check: Check | None = None,
        limits: DeadLetterLimits | None = None,
        profile: Properties = READER,
    ) -> None:
        """`on_invalid` gets every message that cannot be read or that `check` refuses; `DeadLetters.send` fits. These messages are always
        counted and logged. `limits` replaces the limits of this process.

        Raises TopicMissing, NotAuthorized or ClusterUnreachable.
        """
        self._topics = {wire.namespace.topic(topic): topic for topic in topics}
        self._physical = {topic.name: physical for physical, topic in self._topics.items()}
        self._metrics = wire.metrics
        self._on_invalid = on_invalid
        self._check = check
        self._budget = DeadLetterBudget(limits or wire.dead_letter_limits, wire.clock, wire.metrics)
        self._decoder = Decoder(wire, topics)
        self._positions: dict[Place, int] = {}
        self._ends_at_start: dict[Place, int] | None = None
        # Of partitions that are read again: up to where what could not be read was told.
        self._told_to: dict[Place, int] = {}
        self._at_end: set[Place] = set()
        self._ends_seen: set[Place] = set()
        self._ends_asked: set[Place] = set()
        self._properties = {
            "client.id": wire.client_id,
            "group.id": f"{wire.client_id}.reader",
            "isolation.level": isolation.value,
            "enable.partition.eof": True,
        }
        self._cluster = cluster
        self._consumer = cluster.consumer({**profile, **self._properties})
        try:
            self._num_partitions = {topic.name: num_partitions(self._consumer, physical) for physical, topic in self._topics.items()}
        except Exception:  # close the client, because the caller gets no reader to close
            self._consumer.close()
            raise
        self._decoder.set_num_partitions({physical: self._num_partitions[topic.name] for physical, topic in self._topics.items()})

    @property
    def places(self) -> tuple[Place, ...]:
        """Every partition that is read."""
        return tuple((name, partition) for name, count in self._num_partitions.items() for partition in range(count))

    @property
    def positions(self) -> dict[Place, int]:
        """The next offset of every partition, after what `read` returned."""
        return dict(self._positions)

    def take_ends(self, then_look: Iterable[Place] = ()) -> frozenset[Place]:
        """Partitions whose end was reached since the last call: `read` has returned all that they held at that moment.

        The cluster reports an end once, and not again until a record comes. So this asks again for the partitions of `then_look`; a later
        `read` gets the answer. A paused partition, or one whose broker does not answer, reports no end. Raises TransportError.
        """
        found = frozenset(self._ends_seen)
        self._ends_seen.clear()
        with translated("the log"):
            # A second request would make the cluster start its answer again.
            for name, partition in (set(then_look) & self._at_end) - self._ends_asked:
                self._consumer.seek(TopicPartition(self._physical[name], partition, self._positions[name, partition]))
                self._ends_asked.add((name, partition))
        return found

    def bounds(self) -> dict[Place, tuple[int, int]]:
        """The first offset of every partition, and the offset after its last record; fetches no records."""
        return self._named(watermarks(self._consumer, self._physical_places))

    def start(self, positions: Mapping[Place, int] | None = None, *, otherwise: From = From.BEGINNING) -> dict[Place, int]:
        """Read from `positions`, and in partitions without a position from `otherwise`. May be called again, to read from elsewhere.

        Returns the end offset of every partition at this moment. Raises OffsetLost for a position that its partition does not hold:
        retention deleted the records, or the topic was deleted and created again.
        """
        wanted = positions or {}
        for place in wanted:
            if place[1] >= self._num_partitions.get(place[0], 0):
                raise TopicMissing(f"There is no partition {place[1]} of {place[0]}.", hint="Compare with `echoswarm topics check`.")
        chosen = {}
        bounds = self.bounds()
        for place, (low, high) in bounds.items():
            offset = wanted.get(place, low if otherwise is From.BEGINNING else high)
            if offset < low:
                raise OffsetLost(f"{place[0]}[{place[1]}] begins at {low}; offsets {offset} to {low - 1} are past its retention.")
            if offset > high:
                raise OffsetLost(f"{place[0]}[{place[1]}] ends at {high}, before the position {offset}: it is not the topic it was.")
            chosen[place] = offset
        self._at_end.clear()
        self._ends_seen.clear()
        self._ends_asked.clear()
        self._positions = chosen
        ends = {place: high for place, (_, high) in bounds.items()}
        self._ends_at_start = ends
        self._consumer.assign([TopicPartition(self._physical[name], partition, chosen[name, partition]) for name, partition in self.places])
        return dict(ends)

    def read(self, max_messages: int = _BATCH, timeout_s: float = 1.0) -> list[Message]:
        """The next messages, in offset order within each partition; empty if none came in time. Blocks for at most `timeout_s`.

        Dead letters of unreadable messages are acknowledged when this returns, so the caller may store the positions.

        Raises OffsetLost, TopicMissing, NotAuthorized, TransportError, TooManyDeadLetters, RegistryError; DeliveryFailed or
        DeadlineExceeded for a dead letter.
        """
        self._ends_at_start = None
        with translated("the log"):
            first = self._consumer.poll(timeout_s)
            if first is None:
                return []
            fetched = [first, *self._consumer.consume(max_messages - 1, 0)] if max_messages > 1 else [first]
        return self._decode(fetched)

    def end_offsets(self) -> dict[Place, int]:
        """The end offset of every partition now. Takes up to half a second, because the request waits behind a fetch."""
        return self._named(end_offsets(self._consumer, self._physical_places))

    def offsets_at(self, time_ms: int) -> dict[Place, int]:
        """For every partition, the first offset whose record is not older than `time_ms`; its end if all are older."""
        offsets = self._named(offsets_at(self._consumer, self._physical_places, time_ms))
        if OFFSET_END not in offsets.values():
            return offsets
        # The ends come before the times: a record that is written between both requests has an offset, or lies behind the end.
        ends = self.end_offsets()
        offsets = self._named(offsets_at(self._consumer, self._physical_places, time_ms))
        return {place: ends[place] if offset == OFFSET_END else offset for place, offset in offsets.items()}

    def has_reached(self, ends: Mapping[Place, int]) -> bool:
        """Whether `read` has returned everything below `ends` that this isolation can see; it does not wait for an open transaction."""
        return all(self._positions[place] >= end or place in self._at_end for place, end in ends.items())

    def read_to_end(self, patience: Deadline, ends: Mapping[Place, int] | None = None) -> Iterator[list[Message]]:
        """Batches up to `ends`, possibly with some later messages. Without `ends`: up to the ends at `start`, or, if `read` was called
        since, up to the ends now. After two seconds the log reports the progress.

        `patience` limits the time without progress: it starts again whenever a position moves. Raises DeadlineExceeded.
        """
        goal = ends if ends is not None else self._ends_at_start or self.end_offsets()
        most_s = patience.remaining_s()
        note = ReadingNote(", ".join(self._physical), self._num_before(goal), patience.clock)
        while not self.has_reached(goal):
            left = self._num_before(goal)
            messages = self.read(timeout_s=min(_STEP_S, patience.remaining_s()))
            if self._num_before(goal) < left:
                patience = Deadline.after(most_s, patience.clock)
                note.left(self._num_before(goal))
            elif patience.expired() and not self.has_reached(goal):
                behind = {place: (self._positions[place], end) for place, end in goal.items() if self._positions[place] < end}
                raise DeadlineExceeded(f"Nothing of the log came for {most_s:g} s, before its end; position and end: {behind}.")
            if messages:
                yield messages
        note.done()

    def stay(self) -> None:
        """Call at the end of the log: replaces the client by one that gets new records at once but asks the cluster seldom
        (`profiles.WATCHER`). Afterwards call `read` and `close` only: any other request would wait behind a fetch.
        """
        watcher = self._cluster.consumer({**WATCHER, **self._properties})
        looked, self._consumer = self._consumer, watcher
        looked.close()
        self._at_end.clear()
        watcher.assign([TopicPartition(self._physical[name], partition, offset) for (name, partition), offset in self._positions.items()])

    def _num_before(self, ends: Mapping[Place, int]) -> int:
        """Offsets that are still to be read before `ends`."""
        return sum(max(0, end - self._positions[place]) for place, end in ends.items())

    def pause(self, places: Iterable[Place]) -> None:
        """Fetch nothing from these partitions until `resume`; meanwhile their ends are unknown."""
        paused = frozenset(places)
        self._consumer.pause(self._physical_of(paused))
        self._at_end -= paused
        self._ends_seen -= paused
        self._ends_asked -= paused

    def resume(self, places: Iterable[Place]) -> None:
        """Fetch again, from the positions."""
        self._consumer.resume(self._physical_of(places))

    def go_back(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Read partitions that are not paused again: from these offsets, or from the first record if that is later; returns from where.

        Until a record has come, none of them must be paused. What cannot be read is not told again. Raises TransportError.
        """
        begins = dict(offsets)
        try:
            found = self._named(watermarks(self._consumer, [(self._physical[name], number) for name, number in offsets], _LOOK_BACK_S))
            begins |= {place: max(offset, found[place][0]) for place, offset in offsets.items()}
        except ClusterUnreachable as exc:
            logger.warning("Where the log begins is not known, and it is read again from %s: %s", begins, exc)
        for place, offset in begins.items():
            self._told_to[place] = max(self._told_to.get(place, 0), self._positions[place])
            self._positions[place] = offset
            with translated("the log"):
                self._consumer.seek(TopicPartition(self._physical[place[0]], place[1], offset))
        for known in (self._at_end, self._ends_seen, self._ends_asked):
            known -= begins.keys()
        return begins

    def close(self) -> None:
        self._consumer.close()

    def _decode(self, fetched: Sequence[RawMessage]) -> list[Message]:
        """The hot path. Updates the position once per sequence of messages of one partition, because the client returns them so."""
        messages: list[Message] = []
        append, decode, check = messages.append, self._decoder.decode, self._check
        physical, partition = fetched[0].topic(), fetched[0].partition()
        offset: int | None = None
        num_read = num_ignored = num_valid = num_bytes = 0
        letters: list[Receipt] = []
        try:
            for raw in fetched:
                error = raw.error()
                if error is not None:
                    self._note(error, raw)
                    continue
                if raw.partition() != partition or raw.topic() != physical:
                    self._count(physical, partition, offset, (num_read, num_bytes, num_ignored, num_valid))
                    physical, partition = raw.topic(), raw.partition()
                    num_read = num_ignored = num_valid = num_bytes = 0
                try:
                    message = decode(raw)
                    if check is not None and message is not None:
                        check(message)
                except InvalidRecord as invalid:
                    self._budget.count_valid(num_valid)
                    num_valid = 0
                    letter = self._reject(raw, invalid)
                    if letter is not None:
                        letters.append(letter)
                else:
                    num_valid += 1
                    if message is None:
                        num_ignored += 1
                    else:
                        append(message)
                num_bytes += len(raw)
                num_read += 1
                offset = raw.offset()
        finally:
            self._count(physical, partition, offset, (num_read, num_bytes, num_ignored, num_valid))
        for letter in letters:
            letter.wait(_ACKNOWLEDGED_S)
        return messages

    def _count(self, physical: str | None, partition: int | None, offset: int | None, counts: tuple[int, int, int, int]) -> None:
        """Move the position of a partition behind `offset`. `counts`: messages, bytes, ignored, and valid since the last invalid one."""
        num_read, num_bytes, num_ignored, num_valid = counts
        if not num_read or physical is None or partition is None or offset is None:
            return
        place = (self._topics[physical].name, partition)
        if offset >= self._positions[place]:
            self._positions[place] = offset + 1
            self._at_end.discard(place)
        self._budget.count_valid(num_valid)
        self._metrics.records_read.labels(physical).inc(num_read)
        self._metrics.bytes_read.labels(physical).inc(num_bytes)
        if num_ignored:
            self._metrics.records_ignored.labels(physical, IgnoredReason.OTHER_RUN.value).inc(num_ignored)

    def _note(self, error: KafkaError, raw: RawMessage) -> None:
        """Handle an event that the client returns as a message: the end of a partition, or an error."""
        if error.code() != END_OF_PARTITION:
            check_error(error, raw)
            return
        topic, partition, offset = self._topics.get(raw.topic() or ""), raw.partition(), raw.offset()
        if topic is not None and partition is not None:
            place = (topic.name, partition)
            self._at_end.add(place)
            self._ends_seen.add(place)
            self._ends_asked.discard(place)
            if offset is not None:
                self._positions[place] = max(self._positions[place], offset)

    def _reject(self, raw: RawMessage, invalid: InvalidRecord) -> Receipt | None:
        """The receipt of the dead letter, if there is one."""
        topic = self._decoder.topic_of(raw)
        if topic.dead_letters or (raw.offset() or 0) < self._told_to.get((topic.name, raw.partition() or 0), 0):
            return None
        is_within_budget = self._budget.count_invalid(raw, invalid)
        return None if self._on_invalid is None else self._on_invalid(raw, topic, invalid, is_within_budget)

    @property
    def _physical_places(self) -> list[tuple[str, int]]:
        return [(self._physical[name], partition) for name, partition in self.places]

    def _named(self, found: Mapping[tuple[str, int], T]) -> dict[Place, T]:
        return {(self._topics[physical].name, partition): value for (physical, partition), value in found.items()}

    def _physical_of(self, places: Iterable[Place]) -> list[TopicPartition]:
        return [TopicPartition(self._physical[name], partition) for name, partition in places]
