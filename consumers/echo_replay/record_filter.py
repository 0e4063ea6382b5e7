"""The filter of a selection on messages of `trajectories`. Pure, except for the codec's schemas.

Compares a few projected fields before it decodes a record: a filter that keeps little reads fifty thousand messages a second.
"""

from __future__ import annotations

from dataclasses import replace

from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers
from echo_replay.fates import BookEntry, Fates
from echo_replay.selection import Everything, Groups, Selection, Times, Versions
from echo_schemas.codec import Codec
from echo_schemas.converters import maker_of
from echo_schemas.errors import InvalidRecord
from echo_schemas.headers import run_of
from echo_schemas.projection import Projection
from echo_schemas.records import Purpose, Trajectory
from echo_streams.intake import Identity

_FIELDS = ("run_id", "seq", "index", "purpose", "task", "min_version", "max_version", "worker_id")
_IDENTITY = ("run_id", "group_id", "seq", "attempt", "index", "purpose")
_PURPOSES = {purpose.value.encode(): purpose for purpose in Purpose}
_make_identity = maker_of(Identity)
# Errors of reading fields of arbitrary bytes: no record, no UTF-8, an unknown purpose.
_NO_RECORD = (InvalidRecord, ValueError, KeyError)
Passed = tuple[Trajectory | None, BookEntry]


class RecordFilter:
    """The filter of one run and one selection. `fates` may grow meanwhile."""

    def __init__(self, run_id: str, selection: Selection, fates: Fates, codec: Codec) -> None:
        self._run_id, self._selection, self._fates, self._codec = run_id, selection, fates, codec
        self._takes_all = replace(selection, range=Everything()) == Selection() and not isinstance(selection.range, Versions)
        self._prefix, self._run = f"{run_id}/".encode(), run_id.encode()
        self._read = Projection(Trajectory, _FIELDS, codec.ids).read
        self._read_identity = Projection(Trajectory, _IDENTITY, codec.ids).read
        where = selection.range
        self._keys = frozenset(group.encode() for group in where.group_ids) if isinstance(where, Groups) else None
        self._times = where if isinstance(where, Times) else None
        self._versions = (where.first, where.last) if isinstance(where, Versions) else None
        self._worker, self._task = selection.worker.encode(), selection.task.encode()
        self._purposes = frozenset(purpose.value.encode() for purpose in selection.purposes)

    def look(self, raw: RawMessage) -> Passed | None:
        """The trajectory (None: unreadable) and its fate; None if the selection excludes the message. Raises RegistryError."""
        if not self._may_be_ours(raw):
            return None
        partition, offset = raw.partition() or 0, raw.offset() or 0
        if self._takes_all:
            return self._decoded(raw, partition, offset)
        try:
            entry = self._admitted(raw, partition, offset)
            if entry is None:
                return None
            record = self._codec.decode(raw.value())
        except _NO_RECORD:
            entry = self._fates.of(partition, offset, None)
            return (None, entry) if self._selection.wants_unreadable and self._wants(entry) else None
        return (record, entry) if isinstance(record, Trajectory) else None

    def identify(self, raw: RawMessage) -> tuple[Identity | None] | None:
        """As `look`, of an undecoded record, also of one that decoding would refuse: which sample it is (None: unreadable)."""
        if not self._may_be_ours(raw):
            return None
        partition, offset = raw.partition() or 0, raw.offset() or 0
        try:
            if not self._takes_all and self._admitted(raw, partition, offset) is None:
                return None
            run, group_id, seq, attempt, index, purpose = self._read_identity(raw.value())
            if run != self._run:
                return None
            return (_make_identity(group_id=group_id.decode(), seq=seq, purpose=_PURPOSES[purpose], attempt=attempt.decode(), index=index),)
        except _NO_RECORD:
            wanted = self._takes_all or (self._selection.wants_unreadable and self._wants(self._fates.of(partition, offset, None)))
            return (None,) if wanted else None

    def _admitted(self, raw: RawMessage, partition: int, offset: int) -> BookEntry | None:
        """The fate of a record that the filters admit. Raises one of `_NO_RECORD`; RegistryError."""
        run, seq, index, purpose, task, oldest, newest, worker = self._read(raw.value())
        if run != self._run or not self._admits(index, purpose, task, oldest, newest, worker):
            return None
        entry = self._fates.of(partition, offset, _PURPOSES[purpose], seq)
        return entry if self._wants(entry) else None

    def _decoded(self, raw: RawMessage, partition: int, offset: int) -> Passed | None:
        """Without a filter, decode at once: reading a few fields first would be wasted time."""
        try:
            record = self._codec.decode(raw.value())
        except InvalidRecord:
            return None, self._fates.of(partition, offset, None)
        if not isinstance(record, Trajectory) or record.run_id != self._run_id:
            return None
        return record, self._fates.of(partition, offset, record.purpose, record.seq)

    def _wants(self, entry: BookEntry) -> bool:
        return not self._selection.fates or entry.fate in self._selection.fates

    def _may_be_ours(self, raw: RawMessage) -> bool:
        key = raw.key()
        if self._keys is not None:
            return key in self._keys
        if self._times is not None:
            time_ms = raw.timestamp()[1]
            if (self._times.since_ms or 0) > time_ms or (self._times.until_ms is not None and time_ms > self._times.until_ms):
                return False
        # A key that begins with the run id is probably ours, and the body decides. For any other key look at the headers too.
        return (key is not None and key.startswith(self._prefix)) or (run_of(raw_headers(raw)) or self._run_id) == self._run_id

    def _admits(self, index: int, purpose: bytes, task: bytes, oldest: int, newest: int, worker: bytes) -> bool:
        if self._versions is not None and (newest < self._versions[0] or oldest > self._versions[1]):
            return False
        return (
            (not self._worker or worker == self._worker)
            and (not self._task or task == self._task)
            and (not self._purposes or purpose in self._purposes)
            and (self._selection.sample is None or index == self._selection.sample)
        )
