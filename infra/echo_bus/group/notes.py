"""What a member of a group writes beside its committed offsets, for whoever has the partition next.

Kafka keeps a short text with each committed offset (`metadata`, 4,096 bytes by default). It moves with the partition: the next owner reads
it before its first message, whatever became of the one before, and a member that the group has given up cannot write it any more.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from confluent_kafka import TopicPartition

from echo_bus.client.cluster import RawConsumer
from echo_bus.client.consumer_queries import committed, end_offsets
from echo_bus.errors import TransportError

logger = logging.getLogger(__name__)

MAX_NOTE_LENGTH = 4_000
"""Characters of ASCII that every cluster accepts."""
_READ_S = 5.0


class Notes(Protocol):
    """The notes of a loop that reads one topic. All calls come from its poll thread."""

    def found(self, partition: int, note: str, end: int) -> None:
        """`partition` is ours from now on; `note` is what its last owner left, or empty. No earlier owner has got what lies at `end` or
        above.
        """

    def write(self, partition: int, offset: int, *, leaving: bool) -> str:
        """What to leave beside `offset`; `leaving`: the partition is handed over in good order."""

    def written(self, partition: int, note: str) -> None:
        """The group has `note`."""


class _Nothing:
    """No notes."""

    def found(self, partition: int, note: str, end: int) -> None: ...

    def write(self, partition: int, offset: int, *, leaving: bool) -> str:
        del partition, offset, leaving
        return ""

    def written(self, partition: int, note: str) -> None: ...


class NoteKeeper:
    """The loop's side: reads notes when partitions come, and tells which commits carried them. Used from the poll thread alone."""

    def __init__(self) -> None:
        self.notes: Notes = _Nothing()
        self._unconfirmed: deque[list[tuple[int, str]]] = deque()

    def read(self, consumer: RawConsumer, partitions: Sequence[TopicPartition]) -> None:
        """Read what the last owners left, for two round trips. A cluster that does not answer leaves the notes empty."""
        if isinstance(self.notes, _Nothing) or not partitions:
            return
        places = [(place.topic, place.partition) for place in partitions]
        ends = dict.fromkeys(places, sys.maxsize)
        found = list(partitions)
        try:
            ends = end_offsets(consumer, places, _READ_S)
            found = committed(consumer, places, _READ_S)
        except TransportError as exc:
            logger.warning("What earlier owners noted of %d partitions cannot be read: %s", len(partitions), exc.message)
        for place in found:
            self.notes.found(place.partition, getattr(place, "metadata", None) or "", ends[place.topic, place.partition])

    def sent(self, noted: list[tuple[int, str]]) -> None:
        """A commit with these notes is on its way."""
        self._unconfirmed.append(noted)

    def answered(self, *, accepted: bool) -> None:
        """The oldest commit on its way has an answer; commits are answered in order."""
        if self._unconfirmed:
            self.confirm(self._unconfirmed.popleft() if accepted else self._unconfirmed.popleft()[:0])

    def confirm(self, noted: list[tuple[int, str]]) -> None:
        """The group has these notes."""
        for partition, note in noted:
            self.notes.written(partition, note)
