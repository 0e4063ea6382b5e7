"""Reading the log by position: no group, no commits, the caller owns the positions. The learner, replay, views and tools read this way.

One thread uses a reader. `read` blocks for at most its timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from echo_bus import profiles
from echo_bus.cluster import Cluster, RawConsumer, RawMessage
from echo_bus.decoding import Decoder, IgnoredReason
from echo_bus.errors import ClusterUnreachable, NotAuthorized, OffsetLost, TopicMissing, TransportError
from echo_bus.message import Message
from echo_bus.metrics import BusMetrics
from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.naming import Namespace
from echo_schemas.records import Coordinates
from echo_schemas.topics import Topic

Place = tuple[Topic, int]
BEGINNING = OFFSET_BEGINNING
END = OFFSET_END
# What is drained after the first message: enough to amortise a call, small enough to bound what one call returns.
DEFAULT_BATCH = 500


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that is not a record, and why. The position has moved past it; `raw` has its original bytes."""

    topic: Topic
    partition: int
    offset: int
    reason: InvalidReason
    detail: str
    raw: RawMessage

    @property
    def coordinates(self) -> Coordinates:
        """(partition, offset)."""
        return Coordinates(partition=self.partition, offset=self.offset)


class LogReader:
    """Reads partitions from given positions, in offset order within each. A gap in offsets (compaction, markers) is no loss."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Sequence[Topic],
        *,
        namespace: Namespace,
        codec: Codec,
        metrics: BusMetrics,
        client_id: str,
        run_id: str | None = None,
        start: int | Mapping[Place, int] = BEGINNING,
        isolation: str = "read_committed",
        timeout_s: float = 10.0,
    ) -> None:
        """`start`: BEGINNING, END, or an offset for each (topic, partition); places left out are not read.

        Raises TopicMissing, ClusterUnreachable or NotAuthorized.
        """
        self._namespace = namespace
        config = {**profiles.READER, "client.id": client_id, "isolation.level": isolation, "enable.partition.eof": True}
        self._consumer: RawConsumer = cluster.consumer(config)
        self._timeout_s = timeout_s
        self._metrics = metrics
        try:
            counts = {topic: num_partitions(self._consumer, namespace.topic(topic), timeout_s) for topic in topics}
            self._decoder = Decoder(codec, namespace, topics, run_id=run_id)
            self._decoder.set_num_partitions({namespace.topic(topic): count for topic, count in counts.items()})
            self._by_name = {namespace.topic(topic): topic for topic in topics}
            starts: Mapping[Place, int] = (
                start
                if isinstance(start, Mapping)
                else {(topic, number): start for topic, count in counts.items() for number in range(count)}
            )
            self.positions: dict[Place, int] = {place: offset for place, offset in starts.items() if offset >= 0}
            """The next offset to be read of each place; a place that has read nothing from a symbolic start is absent."""
            self._caught_up: set[Place] = set()
            self._places = list(starts)
            self._consumer.assign([TopicPartition(namespace.topic(topic), number, offset) for (topic, number), offset in starts.items()])
        except BaseException:
            self._consumer.close()
            raise

    def read(self, timeout_s: float, most: int = DEFAULT_BATCH) -> list[Message | Rejected]:
        """Up to `most` messages: waits for the first, then takes what is there. Empty when none came in time.

        Records of other runs are passed over. Raises OffsetLost if a position is no longer in the log.
        """
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        # One message, then what is there already: a consume with a time-out would wait it out for a full batch.
        found: list[Message | Rejected] = []
        for raw in (first, *self._consumer.consume(most - 1, 0)):
            error = raw.error()
            if error is not None:
                self._on_error(raw, error)
                continue
            place = (self._by_name[raw.topic() or ""], raw.partition() or 0)
            self.positions[place] = (raw.offset() or 0) + 1
            message = self._decode(place, raw)
            if message is not None:
                found.append(message)
        return found

    def caught_up(self, places: Iterable[Place] | None = None) -> bool:
        """Whether every place (or those given) has been read to the end at least once since the start or the last seek."""
        return self._caught_up.issuperset(self._places if places is None else places)

    @property
    def caught_up_places(self) -> frozenset[Place]:
        """The places that were read to their end at least once."""
        return frozenset(self._caught_up)

    def bounds(self) -> dict[Place, tuple[int, int]]:
        """(first offset still there, end offset) of every place, asked of the brokers."""
        found: dict[Place, tuple[int, int]] = {}
        for topic, number in self._places:
            bounds = self._consumer.get_watermark_offsets(TopicPartition(self._namespace.topic(topic), number), timeout=self._timeout_s)
            if bounds is None:
                raise ClusterUnreachable(f"The bounds of {topic.name}-{number} were not answered within {self._timeout_s:g} s.")
            found[topic, number] = bounds
        return found

    def seek(self, place: Place, offset: int) -> None:
        """Read `place` from `offset` on."""
        topic, number = place
        self._consumer.seek(TopicPartition(self._namespace.topic(topic), number, offset))
        self._caught_up.discard(place)
        if offset >= 0:
            self.positions[place] = offset

    def pause(self, places: Iterable[Place]) -> None:
        """Stop reading these for now."""
        self._consumer.pause([TopicPartition(self._namespace.topic(topic), number) for topic, number in places])

    def resume(self, places: Iterable[Place]) -> None:
        """Read these again."""
        self._consumer.resume([TopicPartition(self._namespace.topic(topic), number) for topic, number in places])

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        self._consumer.close()

    def _decode(self, place: Place, raw: RawMessage) -> Message | Rejected | None:
        topic, partition = place
        try:
            message = self._decoder.decode(raw)
        except InvalidRecord as invalid:
            self._metrics.records_invalid.labels(topic.name, invalid.reason.value).inc()
            return Rejected(topic, partition, raw.offset() or 0, invalid.reason, invalid.message, raw)
        if message is None:
            self._metrics.records_ignored.labels(topic.name, IgnoredReason.OTHER_RUN.value).inc()
        return message

    def _on_error(self, raw: RawMessage, error: KafkaError) -> None:
        topic = self._by_name.get(raw.topic() or "")
        place = (topic, raw.partition() or 0) if topic is not None else None
        if error.code() == KafkaError._PARTITION_EOF and place is not None:  # noqa: SLF001  public in librdkafka
            self._caught_up.add(place)
            # Control records at the end are passed without being read: the position may follow.
            self.positions[place] = max(self.positions.get(place, 0), raw.offset() or 0)
            return
        raise_for(error, f"{raw.topic()}-{raw.partition()}", raw.offset())


def num_partitions(consumer: RawConsumer, physical: str, timeout_s: float) -> int:
    """How many partitions a topic has. Raises TopicMissing or ClusterUnreachable."""
    try:
        found = consumer.list_topics(physical, timeout=timeout_s).topics.get(physical)
    except KafkaException as exc:
        raise ClusterUnreachable(f"The cluster did not answer within {timeout_s:g} s: {exc.args[0].str()}.") from exc
    if found is None or not found.partitions:
        raise TopicMissing(f"The topic {physical} does not exist.", hint="Run `echoswarm topics apply`.")
    return len(found.partitions)


def raise_for(error: KafkaError, where: str, offset: int | None) -> None:
    """Raise for an error that a consumer reports as a message; return for one that the client mends by itself."""
    code = error.code()
    if code in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:  # noqa: SLF001  public in librdkafka
        raise OffsetLost(f"Offset {offset} of {where} is not in the log: retention removed it, or the topic was made anew.")
    if code in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}:  # noqa: SLF001  public in librdkafka
        raise TopicMissing(f"{where} does not exist.", hint="Run `echoswarm topics apply`.")
    if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED}:
        raise NotAuthorized(f"This client may not read {where}: {error.str()}.", hint="Compare with `echoswarm acls render`.")
    if error.fatal():
        raise TransportError(f"The consumer of {where} failed for good: {error.str()}.")
