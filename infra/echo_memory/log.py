"""One partition: an append-only list of records with transactions, retention and compaction. Pure state; the broker holds the lock."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from echo_memory.message import MemoryMessage


class TransactionState(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False, slots=True)
class Transaction:
    """One transaction, its partitions, and the groups' positions after its commit: group → place → (offset, note)."""

    state: TransactionState = TransactionState.OPEN
    partitions: set[tuple[str, int]] = field(default_factory=set)
    positions: dict[str, dict[tuple[str, int], tuple[int, str]]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Stored:
    """One record in the log. A control record (transaction marker) takes an offset, but readers never get it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] | None
    timestamp_ms: int
    transaction: Transaction | None = None
    control: bool = False

    def message(self, topic: str, partition: int) -> MemoryMessage:
        """The message for a reader."""
        return MemoryMessage(topic, partition, self.offset, self.key, self.value, self.headers, self.timestamp_ms)


class PartitionLog:
    """The records of one partition in offset order, possibly with gaps (compaction, retention)."""

    def __init__(self) -> None:
        self._records: list[Stored] = []
        self.start = 0
        self.end = 0

    def copy(self) -> PartitionLog:
        """A log with the same records that shares no later ones."""
        twin = PartitionLog()
        twin._records, twin.start, twin.end = list(self._records), self.start, self.end
        return twin

    def append(self, record: Stored) -> int:
        """Store `record` at the end and return its offset."""
        record.offset = self.end
        self._records.append(record)
        self.end += 1
        return record.offset

    @property
    def last_stable(self) -> int:
        """Offset of the oldest open transaction's first record, or the end."""
        for record in self._records:
            if record.transaction is not None and record.transaction.state is TransactionState.OPEN:
                return record.offset
        return self.end

    def read(self, offset: int, *, committed: bool) -> Iterator[Stored]:
        """Records from `offset` on that a reader with this isolation sees."""
        limit = self.last_stable if committed else self.end
        for record in self._records[self._index(offset) :]:
            if record.offset >= limit:
                return
            aborted = record.transaction is not None and record.transaction.state is TransactionState.ABORTED
            if not record.control and not (committed and aborted):
                yield record

    def next_readable(self, offset: int, *, committed: bool) -> int:
        """The position of a reader at the end: past trailing markers, gaps and aborted records."""
        return max(offset, self.last_stable if committed else self.end)

    def offset_at(self, timestamp_ms: int) -> int | None:
        """The first offset whose record is not older than `timestamp_ms`."""
        return next((record.offset for record in self._records if not record.control and record.timestamp_ms >= timestamp_ms), None)

    def delete_before(self, offset: int) -> None:
        """Delete the records below `offset`, as retention does."""
        self.start = max(self.start, min(offset, self.end))
        del self._records[: self._index(self.start)]

    def compact(self) -> None:
        """Keep the newest record of each key and delete tombstones. Records of open transactions stay. Offsets do not change."""
        stable = self.last_stable
        newest = {
            record.key: record.offset
            for record in self._records
            if record.offset < stable
            and not record.control
            and not (record.transaction is not None and record.transaction.state is TransactionState.ABORTED)
        }
        self._records = [
            record
            for record in self._records
            if record.offset >= stable or (not record.control and newest.get(record.key) == record.offset and record.value is not None)
        ]

    def _index(self, offset: int) -> int:
        return bisect.bisect_left(self._records, offset, key=lambda record: record.offset)
