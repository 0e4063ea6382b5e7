"""Exports a whole run into a folder of Parquet files. A further export adds what is new. Imports pyarrow.

    books (steps, drops, dead letters) ─▶ steps, samples, drops; the fate of each trajectory
    the same topics and some more      ─▶ records, for readers that use the export as a log (`exported_log`)
    rewards [end of last time, now)     ─▶ rewards; columns of trajectories, those of earlier files too
    trajectories [end of last time, now) ─▶ trajectories

Order of reading: books, records, then the end of `rewards`, then the end of `trajectories`. So a trajectory is exported no later than its
step and its rewards; the next export adds later ones. The manifest is committed after each partition, once its files are written: after a
kill the next export goes on from the last commit. Memory: the books, the new rewards of one partition (22 bytes each), and some 32 MB for
each bucket of versions in one stride. Threads: the caller's, and one that writes (`writing`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers
from echo_learner.commit.session import identities
from echo_replay.export.columns import (
    SCHEMAS,
    choose_names,
    drops_table,
    names_in,
    newest_table,
    records_table,
    rewards_table,
    samples_table,
    steps_table,
    trajectories_table,
    workers_table,
)
from echo_replay.export.layout import STRIDE, Slot, Table, bucket_of, folder_of
from echo_replay.export.manifest import (
    ExportedFile,
    ExportManifest,
    check_identity,
    forget_if_empty,
    locked,
    read_manifest,
    remove_leftovers,
    unwritable,
    write_manifest,
)
from echo_replay.export.records import kept_topics, newest_records, own_records
from echo_replay.export.refreshing import News, count_unsettled, refresh
from echo_replay.export.table_file import StagedFile, row_groups, schema_in, write_whole
from echo_replay.export.writing import Writing
from echo_replay.history import History, HistoryRecord
from echo_replay.raw_log import RawLog
from echo_replay.reward_columns import RewardColumns, RewardJoin
from echo_replay.run_log import read_drops
from echo_replay.selection import Offsets, Selection
from echo_runtime.garbage import seldom_collected
from echo_schemas.errors import EchoError, InvalidRecord, UserError
from echo_schemas.headers import run_of
from echo_schemas.records import Drop, Reward, WorkerStatus
from echo_schemas.topics import REWARDS, TRAJECTORIES, WORKERS

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A long export commits so often: a kill loses no more.
_COMMIT_S = 30.0
# Records that become Arrow columns at once: enough to hide the cost of a call, few enough for long trajectories.
_ROWS_AT_ONCE = 500
_BYTES_AT_ONCE = 16 << 20


@dataclass(slots=True, kw_only=True)
class Exported:
    """The result of one export. `num_updated`: rows of earlier exports that changed."""

    manifest: ExportManifest
    num_new: int = 0
    num_updated: int = 0
    num_files: int = 0
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def export_run(bus: Bus, run_id: str, folder: Path, *, stride: int = STRIDE) -> Exported:
    """Export the new records of a run. `stride`: offsets of a file, for a first export. Raises UserError for another run's folder, an
    unknown run, a full disk; TransportError, RegistryError."""
    home = folder_of(folder, run_id)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home), seldom_collected():
            try:
                return _export(replace(bus, run_id=run_id), run_id, home, stride)
            except EchoError:
                forget_if_empty(home)
                raise
    except OSError as exc:
        raise unwritable("export", home, exc) from exc


def _export(bus: Bus, run_id: str, home: Path, stride: int) -> Exported:
    identity = identities(bus)
    known = read_manifest(home)
    if known is not None:
        check_identity(known, home, run_id=run_id, namespace=bus.namespace.name, identity=identity)
        if known.rescored:
            raise UserError(f"{home} holds the scores of {known.rescored[0]!r} from a rescore.", hint="Export into another folder.")
    remove_leftovers(home, known)
    manifest = known or ExportManifest(run_id=run_id, namespace=bus.namespace.name, identity=identity, stride=stride)
    drops, doubts = read_drops(bus, run_id)
    with ExitStack() as stack:
        history = stack.enter_context(History(bus, run_id))
        writing = stack.enter_context(Writing(home))
        export = _Export(bus, home, manifest, history, writing)
        export.notes += doubts
        export.write_books(drops)
        export.write_records()
        rewards = stack.enter_context(RawLog(bus, bus.namespace.topic(REWARDS)))
        # Only now: see the order of reading above.
        trajectories = stack.enter_context(RawLog(bus, bus.namespace.topic(TRAJECTORIES)))
        for number in range(trajectories.num_partitions):
            export.write_partition(number, rewards, (trajectories.lows[number], trajectories.ends[number]))
        export.write_newest(bus.newest(WORKERS, WorkerStatus))
        export.end_partition()
        export.commit(always=known is None)
        done = export.done()
    remove_leftovers(home, done.manifest)
    return done


class _Export:
    def __init__(self, bus: Bus, home: Path, manifest: ExportManifest, history: History, writing: Writing) -> None:
        self._bus, self._home, self._manifest, self._history, self._writing = bus, home, manifest, history, writing
        self._files = {file.slot: file for file in manifest.files}
        self._ranges = {topic: dict(ranges) for topic, ranges in manifest.ranges.items()}
        self._names = manifest.reward_names
        self._missing = list(manifest.missing)
        self._fresh_missing: list[str] = []
        self.notes: list[str] = list(history.notes)
        self._num_new = self._num_updated = self._num_files = 0
        # Written files of rewards that are not to be committed yet.
        self._judged: list[ExportedFile] = []
        # The partition whose last files are being written, and what is exported of it then, by topic.
        self._ending: tuple[int, dict[str, tuple[int, int]]] | None = None
        self._committed_s = bus.clock.monotonic_s()

    def write_books(self, drops: list[Drop]) -> None:
        """Write steps, samples and drops: the buckets that have grown."""
        width = self._manifest.bucket
        for version, steps in itertools.groupby(self._history.log.steps, lambda step: step.version - step.version % width):
            chosen = list(steps)
            self._grow(Slot(Table.STEPS, 0, version, bucket_of(version, width)), steps_table(chosen))
            self._grow(Slot(Table.SAMPLES, 0, version, bucket_of(version, width)), samples_table(chosen))
        by_bucket: dict[int, list[Drop]] = {}
        for drop in drops:
            by_bucket.setdefault(drop.learner_version - drop.learner_version % width, []).append(drop)
        for version, mine in by_bucket.items():
            self._grow(Slot(Table.DROPS, 0, version, bucket_of(version, width)), drops_table(mine))

    def write_records(self) -> None:
        """Write the run's records of other topics."""
        for name, physical in kept_topics(self._bus.namespace).items():
            with RawLog(self._bus, physical) as log:
                for number, low in log.lows.items():
                    begun, start = self._range(name, number, low, log.ends[number])
                    found = own_records(self._bus, log.within({number: (start, log.ends[number])}))
                    self._append(Slot(Table.RECORDS, number, 0, name), found, records_table)
                    self._ranges.setdefault(name, {})[number] = (begun, log.ends[number])

    def write_newest(self, workers: Mapping[str, WorkerStatus]) -> None:
        """Write the newest status of each worker, and the newest records of other compacted topics."""
        mine = {name: worker for name, worker in sorted(workers.items()) if worker.run_id == self._manifest.run_id}
        self._renew(Slot(Table.WORKERS, 0, 0), workers_table(mine.values()))
        for topic, records in newest_records(self._bus, mine):
            self._renew(Slot(Table.RECORDS, 0, 0, topic), newest_table(records))

    def _renew(self, slot: Slot, table: Any) -> None:
        """Write a table again if it has changed."""
        known = self._files.get(slot)
        if known is None or (table.num_rows and next(row_groups(self._home / known.path), None) != table):
            self._keep(write_whole(self._home, slot, table))

    def write_partition(self, number: int, rewards: RawLog, bounds: tuple[int, int]) -> None:
        """Write the new trajectories and rewards of one partition, then update its earlier rows. `end_partition` commits it."""
        low, end = bounds
        begun, start = self._range(TRAJECTORIES.name, number, low, end)
        columns = self._take_rewards(number, rewards, end)
        self.end_partition()
        self._names = choose_names(self._names, columns.names)
        news = News(partition=number, fates=self._history.fates, rewards=columns, names=self._names)
        written: set[Slot] = set()
        records = self._records(number, start, end)
        for first, stride in itertools.groupby(records, lambda each: each.where.offset - each.where.offset % self._manifest.stride):
            written |= self._write_stride(number, first, stride, news)
            # Rewards of later strides are not joined yet, so commit only trajectories so far.
            self._ranges.setdefault(TRAJECTORIES.name, {})[number] = (begun, min(first + self._manifest.stride, end))
            self.commit(only_if_due=True)
        self._refresh_rest(number, news, written)
        ranges = {TRAJECTORIES.name: (begun, end)}
        if number in rewards.ends:
            last = rewards.ends[number]
            ranges[REWARDS.name] = (self._range(REWARDS.name, number, rewards.lows[number], last)[0], last)
        self._ending = number, ranges

    def end_partition(self) -> None:
        """Commit the partition that was written last. Called late: its last files are written while the next one's rewards are read."""
        if self._ending is None:
            return
        (number, ranges), self._ending = self._ending, None
        self._collect()
        for file in self._judged:
            if file.slot.partition == number:
                self._keep(file)
        self._judged = [file for file in self._judged if file.slot.partition != number]
        for topic, found in ranges.items():
            self._ranges.setdefault(topic, {})[number] = found
        self.commit()

    def commit(self, *, only_if_due: bool = False, always: bool = False) -> None:
        """Commit the written files, if there is anything new."""
        now_s = self._bus.clock.monotonic_s()
        if only_if_due and now_s < self._committed_s + _COMMIT_S:
            return
        self._collect()
        manifest = replace(
            self._manifest,
            ranges={topic: dict(ranges) for topic, ranges in self._ranges.items()},
            tip=self._history.log.tip,
            reward_names=self._names,
            missing=tuple(self._missing),
            files=tuple(self._files[slot] for slot in sorted(self._files)),
        )
        if manifest == self._manifest and not always:
            return
        self._manifest = replace(manifest, written_ms=self._bus.clock.time_ms())
        write_manifest(self._home, self._manifest)
        self._committed_s = now_s
        logger.info("Committed %d files of %s", len(self._files), self._manifest.run_id)

    def done(self) -> Exported:
        return Exported(
            manifest=self._manifest,
            num_new=self._num_new,
            num_updated=self._num_updated,
            num_files=self._num_files,
            missing=self._fresh_missing,
            notes=self.notes,
        )

    def _range(self, topic: str, number: int, low: int, end: int) -> tuple[int, int]:
        """The first exported offset of a partition, and the next one to export. Notes offsets that retention has removed between."""
        begun, known_end = self._ranges.get(topic, {}).get(number, (None, None))
        if begun is None or known_end is None:
            if low:
                self._miss(f"Retention has removed offsets 0 to {low - 1} of partition {number} of {topic}.")
            return low, low
        if known_end > end:
            raise UserError(
                f"Partition {number} of {topic} ends at {end}; the export holds its records up to {known_end - 1}.",
                hint="The topic was cut off; export into a new folder.",
            )
        if known_end < low:
            self._miss(f"Retention has removed offsets {known_end} to {low - 1} of partition {number} of {topic}.")
        return begun, max(known_end, low)

    def _miss(self, sentence: str) -> None:
        if sentence not in self._missing:
            self._missing.append(sentence)
            self._fresh_missing.append(sentence)

    def _records(self, number: int, start: int, end: int) -> Iterator[HistoryRecord]:
        if start < end:
            yield from self._history.read(Selection(range=Offsets({number: (start, end - 1)})), rewards=False)

    def _take_rewards(self, number: int, log: RawLog, end: int) -> RewardColumns:
        """The new rewards of a partition, as columns, and in files that are not committed yet."""
        join = RewardJoin(self._manifest.run_id, self._bus.codec.ids, number, 0, end, verifier=self._bus.verifier)
        if number in log.ends:
            _, start = self._range(REWARDS.name, number, log.lows[number], log.ends[number])
            self._append(Slot(Table.REWARDS, number, 0), self._rewards(log, number, start, join), rewards_table)
        return join.columns()

    def _append(self, slot: Slot, found: Iterable[tuple[RawMessage, T]], table_of: Callable[[Sequence[tuple[RawMessage, T]]], Any]) -> None:
        """Append new rows of the partition of `slot` to the file of their stride."""
        stride = self._manifest.stride
        for first, mine in itertools.groupby(found, lambda each: (each[0].offset() or 0) // stride * stride):
            file = self._staged(replace(slot, start=first), SCHEMAS[slot.table])
            while batch := list(itertools.islice(mine, _ROWS_AT_ONCE)):
                self._writing.write(file, table_of(batch))
            self._writing.finish(file)

    def _rewards(self, log: RawLog, number: int, start: int, join: RewardJoin) -> Iterator[tuple[RawMessage, Reward]]:
        """The run's own rewards; adds each to `join`."""
        prefix = f"{self._manifest.run_id}/".encode()
        for batch in log.within({number: (start, log.ends[number])}):
            for raw in batch:
                key = raw.key()
                if (key is None or not key.startswith(prefix)) and run_of(raw_headers(raw)) not in (None, self._manifest.run_id):
                    continue
                try:
                    record = self._bus.codec.decode(raw.value())
                except InvalidRecord:
                    join.add([raw])
                    continue
                if isinstance(record, Reward) and record.run_id == self._manifest.run_id:
                    join.take(raw, record)
                    yield raw, record

    def _staged(self, slot: Slot, schema: Any) -> StagedFile:
        """The new file of a slot, with the rows of the old one."""
        file = self._writing.begin(slot, schema)
        known = self._files.get(slot)
        for table in row_groups(self._home / known.path) if known else ():
            self._writing.write(file, table)
        return file

    def _write_stride(self, number: int, first: int, records: Iterable[HistoryRecord], news: News) -> set[Slot]:
        """Write one file for each bucket of versions in a stride. Returns the written slots."""
        staged: dict[Slot, tuple[StagedFile, Any]] = {}
        for slot, batch in self._by_slot(number, first, records):
            if slot not in staged:
                staged[slot] = self._begin(slot, news)
            file, schema = staged[slot]
            table, _ = refresh(trajectories_table(batch, names_in(schema)), news, schema)
            self._writing.write(file, table, count_unsettled(table))
            self._num_new += len(batch)
        for file, _ in staged.values():
            self._writing.finish(file)
        return set(staged)

    def _by_slot(self, number: int, first: int, records: Iterable[HistoryRecord]) -> Iterator[tuple[Slot, list[HistoryRecord]]]:
        """Batches of one slot each, every slot in the order of the log."""
        slot = Slot(Table.TRAJECTORIES, number, first)
        waiting: dict[str, list[HistoryRecord]] = {}
        num_bytes: dict[str, int] = {}
        for each in records:
            bucket = bucket_of(None if each.trajectory is None else each.trajectory.max_version, self._manifest.bucket)
            mine = waiting.setdefault(bucket, [])
            mine.append(each)
            num_bytes[bucket] = num_bytes.get(bucket, 0) + len(each.raw.value() or b"")
            if len(mine) >= _ROWS_AT_ONCE or num_bytes[bucket] >= _BYTES_AT_ONCE:
                yield replace(slot, bucket=bucket), waiting.pop(bucket)
                num_bytes.pop(bucket)
        yield from ((replace(slot, bucket=bucket), mine) for bucket, mine in waiting.items())

    def _begin(self, slot: Slot, news: News) -> tuple[StagedFile, Any]:
        """The new file of a slot, with the updated rows of the old one."""
        known = self._files.get(slot)
        schema = news.schema_of(None if known is None else schema_in(self._home / known.path))
        file = self._writing.begin(slot, schema)
        for table in row_groups(self._home / known.path) if known else ():
            refreshed, num_changed = refresh(table, news, schema)
            self._num_updated += num_changed
            self._writing.write(file, refreshed, count_unsettled(refreshed))
        return file, schema

    def _refresh_rest(self, number: int, news: News, written: set[Slot]) -> None:
        """Write earlier files again if their rows have changed."""
        stride = self._manifest.stride
        judged = set((news.rewards.offsets // stride * stride).tolist())
        for slot, known in sorted(self._files.items()):
            if slot.table is not Table.TRAJECTORIES or slot.partition != number or slot in written:
                continue
            if not known.num_unsettled and slot.start not in judged:
                continue
            schema = news.schema_of(schema_in(self._home / known.path))
            if any(refresh(table, news, schema)[1] for table in row_groups(self._home / known.path)):
                file, _ = self._begin(slot, news)
                self._writing.finish(file)

    def _grow(self, slot: Slot, table: Any) -> None:
        """Write a table again if it has grown. Rows that retention has removed from the log since stay in the file."""
        known = self._files.get(slot)
        if table.num_rows > (0 if known is None else known.rows):
            self._keep(write_whole(self._home, slot, table))

    def _collect(self) -> None:
        """Keep the finished files. Files of rewards wait until their trajectories are written."""
        for file in self._writing.finished():
            if file.slot.table is Table.REWARDS:
                self._judged.append(file)
            else:
                self._keep(file)

    def _keep(self, file: ExportedFile) -> None:
        self._num_files += self._files.get(file.slot) != file
        self._files[file.slot] = file
