"""Notes that a member of a group commits beside its offsets, for the next owner of the partition.

Kafka keeps a short text with each committed offset (`metadata`, 4,096 bytes by default). The next owner reads it before its first message,
also if the last owner has crashed. A member that the group has removed cannot write it.
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
        """`partition` is assigned; `note` is its last owner's, or empty. No earlier owner has received the messages from `end` on."""

    def write(self, partition: int, offset: int, *, leaving: bool) -> str:
        """The note to commit with `offset`. `leaving`: this member gives the partition up in an orderly way."""

    def written(self, partition: int, note: str) -> None:
        """The group has stored `note`."""


class NoteKeeper:
    """The loop's side: reads notes when partitions are assigned, and reports which notes were committed. Poll thread only."""

    def __init__(self) -> None:
        self.notes: Notes | None = None
        self._unconfirmed: deque[list[tuple[int, str]]] = deque()

    def read(self, consumer: RawConsumer, partitions: Sequence[TopicPartition]) -> None:
        """Read the last owners' notes, in two round trips. If the cluster does not answer, the notes count as empty."""
        if self.notes is None or not partitions:
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

    def write(self, partition: int, offset: int, *, leaving: bool) -> str:
        """See `Notes.write`; empty without notes."""
        return "" if self.notes is None else self.notes.write(partition, offset, leaving=leaving)

    def sent(self, noted: list[tuple[int, str]]) -> None:
        """A commit with these notes is on its way."""
        self._unconfirmed.append(noted)

    def answered(self, *, accepted: bool) -> None:
        """The oldest commit on its way has its answer; answers come in order."""
        noted = self._unconfirmed.popleft() if self._unconfirmed else []
        if accepted:
            self.confirm(noted)

    def confirm(self, noted: list[tuple[int, str]]) -> None:
        """The group has stored these notes."""
        if self.notes is not None:
            for partition, note in noted:
                self.notes.written(partition, note)
