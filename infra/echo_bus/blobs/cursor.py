"""A blob reader's position in the log: one client that reads through one partition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from confluent_kafka import KafkaError, TopicPartition

from echo_bus.client.cluster import RawConsumer, RawMessage
from echo_bus.client.kafka_errors import END_OF_PARTITION
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import DeadlineExceeded, OffsetLost, TransportError
from echo_schemas.records import BlobRef

_FETCH_BATCH = 20
_FETCH_WAIT_S = 0.2
# Wait this long if the log ends before the blob: a broker that has just become leader may not show its last records at once.
_MISSING_S = 1.0
# Up to this distance, read and skip messages instead of seeking.
_NEAR = 50


class BlobCursor:
    """A client, and the messages that it has fetched ahead. One thread uses it; the caller closes the client."""

    def __init__(self, consumer: RawConsumer) -> None:
        self.consumer = consumer
        self._place: tuple[str, int] | None = None
        self._offset = 0
        self._ahead: deque[RawMessage] = deque()

    def go_to(self, physical: str, ref: BlobRef) -> None:
        """Go to the blob's first offset; seek unless it is near."""
        place = (physical, ref.partition)
        if place != self._place or not 0 <= ref.first_offset - self._offset <= _NEAR:
            self.consumer.assign([TopicPartition(*place, ref.first_offset)])
            self._place, self._offset = place, ref.first_offset
            self._ahead.clear()

    def messages(self, ref: BlobRef, stall_s: float, clock: Clock) -> Iterator[RawMessage]:
        """The messages from the blob's first to its last offset; fewer if the log ends before that.

        Raises OffsetLost (retention deleted it), DeadlineExceeded (nothing came for `stall_s`), TransportError.
        """
        missing: Deadline | None = None
        stalled = Deadline.after(stall_s, clock)
        while missing is None or not missing.expired():
            self._fetch(stalled)
            before = self._offset
            while self._ahead:
                message = self._ahead.popleft()
                error = message.error()
                if error is None:
                    missing, offset = None, message.offset() or 0
                    if offset > ref.last_offset:
                        self._ahead.appendleft(message)
                        return
                    self._offset = offset + 1
                    if offset >= ref.first_offset:
                        yield message
                    if offset == ref.last_offset:
                        return
                elif error.code() == END_OF_PARTITION:
                    missing = missing or Deadline.after(_MISSING_S, clock)
                elif error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:  # noqa: SLF001  public in librdkafka
                    raise lost(ref)
                elif not error.retriable():
                    raise TransportError(f"The blob {ref.blob} could not be read: {error.str()}.")
            if self._offset > before:
                # Start now: the time that the caller spent on the messages does not count.
                stalled = Deadline.after(stall_s, clock)
            elif stalled.expired():
                raise DeadlineExceeded(
                    f"Nothing more of the blob {ref.blob} came for {stall_s:g} s; it is read to offset {self._offset} of {ref.last_offset}."
                )

    def _fetch(self, deadline: Deadline) -> None:
        """Fetch available messages, or wait a moment for the first; `consume` alone would wait for a full batch."""
        if not self._ahead and (first := self.consumer.poll(min(_FETCH_WAIT_S, deadline.remaining_s()))) is not None:
            self._ahead.extend((first, *self.consumer.consume(_FETCH_BATCH - 1, 0)))


def lost(ref: BlobRef) -> OffsetLost:
    """The error for a blob that begins below what its partition holds."""
    return OffsetLost(
        f"Retention has removed the blob {ref.blob} (offset {ref.first_offset} of partition {ref.partition}).",
        hint="Raise bytes_per_partition of the topic, or publish the snapshot again.",
    )
