"""A topic as the client returns it, from its beginning to where it ended when it was opened: undecoded, in large batches.

`messages` reads the whole topic, `within` ranges of partitions, `between` a few offsets, `follow` goes on without an end. The caller's
thread does everything. Records of uncommitted transactions are never returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import OFFSET_END, TopicPartition

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.client.consumer_queries import num_partitions, offsets_at, watermarks
from echo_bus.client.kafka_errors import END_OF_PARTITION, check_error, translated
from echo_bus.client.profiles import Properties
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded

Range = tuple[int, int]
"""Offsets [first, end) of a partition."""

_AT_ONCE = 2_000
_WAIT_S = 0.5
# `consume` waits for a full batch, but no longer than this.
_GATHER_S = 0.02
# A gap of so many offsets is read, a longer one left out.
_NEAR = 500
# A broker that sends nothing for so long is not merely slow.
_SILENCE_S = 60.0
# Fetches large enough for a reader that never waits. What is prefetched of short messages takes twice as much again in the client, so their
# number is limited too.
WHOLE: Properties = {
    **profiles.LOOK,
    "fetch.max.bytes": 8_388_608,
    "max.partition.fetch.bytes": 2_097_152,
    "queued.max.messages.kbytes": 32_768,
    "queued.min.messages": 20_000,
}


@dataclass(frozen=True, slots=True)
class Fetched:
    """The messages of one fetch. `left`: partitions that are not read to the end; the next `Fetched` changes the same set."""

    messages: list[RawMessage]
    left: set[int]


class RawLog:
    """One physical topic. A context manager: the client is closed at its end."""

    def __init__(self, bus: Bus, physical: str, profile: Properties = WHOLE) -> None:
        """`profiles.GLIMPSE` for a few records. Raises TopicMissing, NotAuthorized, ClusterUnreachable."""
        self._physical = physical
        self._clock = bus.clock
        properties = {"client.id": bus.client_id, "group.id": f"{bus.client_id}.reader", "enable.partition.eof": True}
        self._consumer = bus.cluster.consumer({**profile, **properties})
        try:
            self.num_partitions = num_partitions(self._consumer, physical)
            bounds = watermarks(self._consumer, [(physical, number) for number in range(self.num_partitions)])
        except BaseException:  # after any failure, an interrupt included, the client must be closed
            self._consumer.close()
            raise
        self.lows: Mapping[int, int] = {place[1]: low for place, (low, _) in bounds.items()}
        """By partition: the first offset that it holds."""
        self.ends: Mapping[int, int] = {place[1]: high for place, (_, high) in bounds.items()}
        """By partition: the offset after the last one that it held when this log was opened."""

    def __enter__(self) -> RawLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._consumer.close()

    def offsets_at(self, time_ms: int) -> dict[int, int]:
        """By partition: the first offset whose record is not older than `time_ms`; where all records are older, the end."""
        places = [(self._physical, number) for number in range(self.num_partitions)]
        found = offsets_at(self._consumer, places, time_ms)
        return {place[1]: self.ends[place[1]] if offset == OFFSET_END else offset for place, offset in found.items()}

    def messages(self) -> Iterator[list[RawMessage]]:
        """All messages below the ends, in batches. Raises DeadlineExceeded if nothing comes, TransportError."""
        return self.within({number: (self.lows[number], end) for number, end in self.ends.items()})

    def within(self, ranges: Mapping[int, Range]) -> Iterator[list[RawMessage]]:
        """The messages of some ranges, in batches, each partition in order; ranges lie between `lows` and `ends`. Raises as `messages`."""
        for fetched in self.fetches({number: [found] for number, found in ranges.items()}):
            if fetched.messages:
                yield fetched.messages

    def fetches(self, ranges: Mapping[int, Sequence[Range]]) -> Iterator[Fetched]:
        """As `within`, for some ranges of each partition, in ascending order; a fetch that brought nothing gives a `Fetched` too."""
        rest = {number: deque(found for found in mine if found[0] < found[1]) for number, mine in ranges.items()}
        left = {number for number, mine in rest.items() if mine}
        num_missing = sum(end - first for mine in rest.values() for first, end in mine)
        self._consumer.assign([TopicPartition(self._physical, number, rest[number][0][0]) for number in sorted(left)])
        silence = Deadline.after(_SILENCE_S, self._clock)
        while left:
            fetched = self._fetched(num_missing)
            if not fetched and silence.expired():
                raise DeadlineExceeded(
                    f"Nothing of {self._physical} has come for {_SILENCE_S:g} s; its partitions {sorted(left)} are not read."
                )
            found = self._wanted(fetched, rest, left)
            num_missing -= len(found)
            yield Fetched(found, left)
            if fetched:
                # The time that the caller takes is no silence of the broker.
                silence = Deadline.after(_SILENCE_S, self._clock)

    def between(self, partition: int, offsets: list[int]) -> Iterator[RawMessage]:
        """The messages at some offsets of one partition, which are in ascending order and below its end."""
        wanted = set(offsets)
        for batch in self.within({partition: (offsets[0], offsets[-1] + 1)}):
            yield from (raw for raw in batch if raw.offset() in wanted)

    def _fetched(self, most: int = _AT_ONCE) -> list[RawMessage]:
        """The messages that the client holds; if it holds none, those that come within `_WAIT_S`. `most`: no more are missing, so that
        a short range does not wait for a full batch."""
        with translated(self._physical):
            first = self._consumer.poll(_WAIT_S)
            if first is None or most <= 1:
                return [] if first is None else [first]
            return [first, *self._consumer.consume(min(most, _AT_ONCE) - 1, _GATHER_S)]

    def pause(self, partition: int) -> None:
        """Fetch nothing of a partition that `within` reads until `resume`."""
        self._consumer.pause([TopicPartition(self._physical, partition)])

    def resume(self, partition: int) -> None:
        """Fetch again."""
        self._consumer.resume([TopicPartition(self._physical, partition)])

    def follow(self, positions: Mapping[int, int]) -> Iterator[list[RawMessage]]:
        """All messages from `positions` on, without an end: a batch every half second or sooner, empty if nothing has come."""
        self._consumer.assign([TopicPartition(self._physical, number, offset) for number, offset in sorted(positions.items())])
        while True:
            batch = []
            for raw in self._fetched():
                if (error := raw.error()) is None:
                    batch.append(raw)
                else:
                    check_error(error, raw)
            yield batch

    def _wanted(self, fetched: list[RawMessage], rest: dict[int, deque[Range]], left: set[int]) -> list[RawMessage]:
        """The messages of `fetched` that lie in `rest`. Removes read ranges from `rest` and finished partitions from `left`."""
        batch: list[RawMessage] = []
        read_to: dict[int, int] = {}
        for raw in fetched:
            partition: int = raw.partition()  # type: ignore[assignment]  # a message, or an event of a partition, has one
            if (error := raw.error()) is not None:
                check_error(error, raw)
                if error.code() == END_OF_PARTITION:
                    left.discard(partition)
                continue
            if partition not in left:
                continue
            offset: int = raw.offset()  # type: ignore[assignment]  # see above
            ranges = rest[partition]
            # Offsets may be missing, so that a range ends before its last one comes.
            while ranges and ranges[0][1] <= offset:
                ranges.popleft()
            if ranges and ranges[0][0] <= offset:
                batch.append(raw)
                if offset + 1 == ranges[0][1]:
                    ranges.popleft()
            if not ranges:
                left.discard(partition)
            read_to[partition] = offset + 1
        for partition, offset in read_to.items():
            if partition in left and rest[partition][0][0] > offset + _NEAR:
                self._consumer.seek(TopicPartition(self._physical, partition, rest[partition][0][0]))
        return batch
