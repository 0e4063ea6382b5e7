"""A topic as the client returns it, from its beginning to where it ended when it was opened: undecoded, in large batches.

Whole (`messages`), ranges of partitions (`within`), a few offsets (`between`), or without an end (`follow`). The caller's thread does
everything. Records of transactions that did not commit are never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.client.consumer_errors import END_OF_PARTITION, check_error
from echo_bus.client.consumer_queries import num_partitions, offsets_at, watermarks
from echo_bus.client.kafka import translate
from echo_bus.client.profiles import Properties
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded

Range = tuple[int, int]
"""Offsets [first, end) of a partition."""

_AT_ONCE = 2_000
_WAIT_S = 0.5
# `consume` waits for a full batch: what is there within this time is enough.
_GATHER_S = 0.02
# Nothing at all for so long is no slowness.
_SILENCE_S = 60.0
# Large fetches, and enough of them ahead of the reader that it never waits for one.
WHOLE: Properties = {
    **profiles.LOOK,
    "fetch.max.bytes": 33_554_432,
    "max.partition.fetch.bytes": 8_388_608,
    "queued.max.messages.kbytes": 131_072,
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was fetched at once. `left`: partitions of which more will come; the set changes with the next one."""

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
        except BaseException:  # whatever ends the queries, an interrupt included: the client must not outlive them
            self._consumer.close()
            raise
        self.lows: Mapping[int, int] = {place[1]: low for place, (low, _) in bounds.items()}
        """The first offset that each partition holds."""
        self.ends: Mapping[int, int] = {place[1]: high for place, (_, high) in bounds.items()}
        """The offset after the last one that each partition held."""

    def __enter__(self) -> RawLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the client."""
        self._consumer.close()

    def offsets_at(self, time_ms: int) -> dict[int, int]:
        """The first offset of every partition whose record is not older than `time_ms`; where all are, its end."""
        places = [(self._physical, number) for number in range(self.num_partitions)]
        found = offsets_at(self._consumer, places, time_ms)
        return {place[1]: self.ends[place[1]] if offset == OFFSET_END else offset for place, offset in found.items()}

    def messages(self) -> Iterator[list[RawMessage]]:
        """Everything below the ends, in batches. Raises DeadlineExceeded if nothing comes, TransportError."""
        return self.within({number: (self.lows[number], end) for number, end in self.ends.items()})

    def within(self, ranges: Mapping[int, Range]) -> Iterator[list[RawMessage]]:
        """The messages of some ranges, in batches, each partition in order; ranges lie between `lows` and `ends`. Raises as `messages`."""
        for stretch in self.stretches(ranges):
            if stretch.messages:
                yield stretch.messages

    def stretches(self, ranges: Mapping[int, Range]) -> Iterator[Stretch]:
        """As `within`, with the partitions that are not at their end yet; also where nothing has come."""
        ends = {number: end for number, (first, end) in ranges.items() if first < end}
        left = set(ends)
        self._consumer.assign([TopicPartition(self._physical, number, ranges[number][0]) for number in sorted(left)])
        silence = Deadline.after(_SILENCE_S, self._clock)
        while left:
            fetched = self._fetched()
            if not fetched and silence.expired():
                raise DeadlineExceeded(
                    f"Nothing of {self._physical} has come for {_SILENCE_S:g} s; its partitions {sorted(left)} are not read."
                )
            yield Stretch(self._below_ends(fetched, ends, left), left)
            if fetched:
                # The reader's own time is no silence of the broker.
                silence = Deadline.after(_SILENCE_S, self._clock)

    def between(self, partition: int, offsets: list[int]) -> Iterator[RawMessage]:
        """The messages at some offsets of one partition, which are in ascending order and below its end."""
        wanted, last = set(offsets), offsets[-1]
        self._consumer.assign([TopicPartition(self._physical, partition, offsets[0])])
        silence = Deadline.after(_SILENCE_S, self._clock)
        while True:
            fetched = self._fetched()
            if silence.expired():
                raise DeadlineExceeded(f"Offset {last} of {self._physical}[{partition}] has not come for {_SILENCE_S:g} s.")
            for raw in fetched:
                if (error := raw.error()) is not None:
                    if error.code() == END_OF_PARTITION:
                        return
                    check_error(error, raw)
                    continue
                offset = raw.offset() or 0
                if offset in wanted:
                    yield raw
                if offset >= last:
                    return

    def _fetched(self) -> list[RawMessage]:
        """What is there, or the first that comes within a moment."""
        try:
            first = self._consumer.poll(_WAIT_S)
            return [] if first is None else [first, *self._consumer.consume(_AT_ONCE - 1, _GATHER_S)]
        except KafkaException as exc:
            raise translate(exc, self._physical) from exc

    def pause(self, partition: int) -> None:
        """Fetch nothing of a partition that `within` reads until `resume`: its reader has enough of it."""
        self._consumer.pause([TopicPartition(self._physical, partition)])

    def resume(self, partition: int) -> None:
        """Fetch again."""
        self._consumer.resume([TopicPartition(self._physical, partition)])

    def follow(self, positions: Mapping[int, int]) -> Iterator[list[RawMessage]]:
        """Everything from `positions` on, for ever: a batch every half second or sooner, empty where nothing has come."""
        self._consumer.assign([TopicPartition(self._physical, number, offset) for number, offset in sorted(positions.items())])
        while True:
            batch = []
            for raw in self._fetched():
                if (error := raw.error()) is None:
                    batch.append(raw)
                elif error.code() != END_OF_PARTITION:
                    check_error(error, raw)
            yield batch

    def _below_ends(self, fetched: list[RawMessage], ends: Mapping[int, int], left: set[int]) -> list[RawMessage]:
        """What of `fetched` lies below the ends; partitions that are done leave `left`."""
        batch: list[RawMessage] = []
        for raw in fetched:
            partition: int = raw.partition()  # type: ignore[assignment]  # a message, or an event of a partition, has one
            error = raw.error()
            if error is not None:
                if error.code() == END_OF_PARTITION:
                    left.discard(partition)
                else:
                    check_error(error, raw)
                continue
            offset: int = raw.offset()  # type: ignore[assignment]  # see above
            if partition in ends and offset < ends[partition]:
                batch.append(raw)
                if offset + 1 == ends[partition]:
                    left.discard(partition)
            else:
                left.discard(partition)
        return batch
