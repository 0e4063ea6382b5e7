"""An export as a read-only log: a bus over its files, from which a history reads as from Kafka. Imports pyarrow.

    home, manifest = open_export(folder)
    with History(bus_of(home, manifest), manifest.run_id) as history: ...

It holds the records that the manifest names. Trajectories and rewards are encoded from their columns on demand: equal records, but not the
signed bytes, so no signature is verified here. Memory: 24 bytes a record of a stride that was read, and `_KEPT_BYTES` of columns.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from echo_bus.bus import Bus
from echo_memory import MemoryCluster
from echo_memory.log import PartitionLog, Stored
from echo_memory.message import MemoryMessage
from echo_replay.export.manifest import ExportManifest
from echo_replay.steps import Ints
from echo_schemas.codec import lock_file_codec
from echo_schemas.converters import converter_of
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Record, Reward, Trajectory
from echo_schemas.schemas import newest
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES

# Columns kept in memory for the next read; a group of rows has 32 MB.
_KEPT_BYTES = 128 << 20
# Rows that become Python objects at once: most reads go on with the neighbours.
_ROWS_AT_ONCE = 64
# Above the rows of any group.
_MOST_ROWS = 1 << 32
_NOTHING: Ints = np.zeros(0, np.int64)
# Fields whose column has another name.
_COLUMNS = {"token_ids": "tokens", "of": "trajectory"}
_NUMBERS = ("tokens", "logprobs")

ValueOf = Callable[[Mapping[str, Any]], bytes | None]


def bus_of(home: Path, manifest: ExportManifest) -> Bus:
    """A bus that reads the export of one run. Raises UserError for an export without records of other topics, or of a rescore."""
    if manifest.rescored:
        raise UserError(f"{home} holds the scores of {manifest.rescored[0]!r} from a rescore, and no run.", hint="Name an export of a run.")
    if STEPS.name not in manifest.ranges:
        raise UserError(
            f"{home} was exported by an earlier release and lacks the records of the learner and the workers.",
            hint=f"`echoswarm export --to {home.parent} --run {manifest.run_id}` adds it, as far as the log still holds it; "
            f"`echoswarm sql --from {home.parent}` answers questions as it is.",
        )
    cluster, groups = MemoryCluster(), _Groups()
    namespace = Namespace(manifest.namespace)
    for spec in load_topic_specs():
        ranges = manifest.ranges.get(spec.name, {})
        said = manifest.identity.get(spec.name, "").rpartition("/")[2]
        count = max([1, int(said) if said.isdecimal() else 1, *(number + 1 for number in ranges)])
        cluster.mount(f"{namespace.name}.{spec.name}", [_partition(home, manifest, spec.name, number, groups) for number in range(count)])
    return Bus(cluster=cluster, namespace=namespace, role="operator", run_id=manifest.run_id)


def _partition(home: Path, manifest: ExportManifest, topic: str, number: int, groups: _Groups) -> PartitionLog:
    files = [file for file in manifest.files if file.slot.topic == topic and file.slot.partition == number]
    strides: dict[int, list[Path]] = {}
    for file in files:
        strides.setdefault(file.slot.start, []).append(home / file.path)
    # The newest records of a compacted topic have no offsets.
    bounds = manifest.ranges.get(topic, {}).get(number, (0, sum(file.rows for file in files)))
    record = {TRAJECTORIES.name: Trajectory, REWARDS.name: Reward}.get(topic)
    return ExportedLog(strides, bounds, groups, partial(_value_of, record, manifest.run_id))


class ExportedLog(PartitionLog):
    """One partition of an export. A reader holds the lock of the cluster."""

    def __init__(self, strides: Mapping[int, Sequence[Path]], bounds: tuple[int, int], groups: _Groups, value_of: ValueOf) -> None:
        """`strides`: the files of each, by its first offset. `bounds`: offsets [start, end). `value_of`: the bytes of a row."""
        super().__init__()
        self.start, self.end = bounds
        self._paths, self._groups, self._value_of = strides, groups, value_of
        self._starts = sorted(strides)
        self._strides: dict[int, _Stride] = {}

    def read(self, offset: int, *, committed: bool) -> Iterator[Stored]:
        """See `PartitionLog`. Raises UserError for a missing file."""
        for start in self._starts[max(0, bisect_right(self._starts, offset) - 1) :]:
            stride = self._stride(start)
            for at in range(int(stride.offsets.searchsorted(offset)), len(stride.offsets)):
                group, row = divmod(int(stride.places[at]), _MOST_ROWS)
                rows = partial(self._groups.row, *stride.groups[group], row)
                yield _ExportedRecord(int(stride.offsets[at]), int(stride.times_ms[at]), rows, self._value_of)

    def offset_at(self, timestamp_ms: int) -> int | None:
        """See `PartitionLog`. If all records are older, the offset after the last one: other runs' records may follow it in the log."""
        offset = None
        for start in self._starts:
            stride = self._stride(start)
            later = np.flatnonzero(stride.times_ms >= timestamp_ms)
            if len(later):
                return int(stride.offsets[later[0]])
            offset = int(stride.offsets[-1]) + 1 if len(stride.offsets) else offset
        return offset

    def _stride(self, start: int) -> _Stride:
        if start not in self._strides:
            self._strides[start] = _read_stride(self._paths[start])
        return self._strides[start]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stride:
    """The rows of a stride in the order of their offsets. `places`: number in `groups` (file, group of rows) * `_MOST_ROWS` + row."""

    offsets: Ints
    times_ms: Ints
    places: Ints
    groups: list[tuple[Path, int]]


def _read_stride(paths: Sequence[Path]) -> _Stride:
    offsets, times_ms, places = [_NOTHING], [_NOTHING], [_NOTHING]
    groups: list[tuple[Path, int]] = []
    for path in paths:
        with _opened(path) as file:
            for number in range(file.num_row_groups):
                kafka = file.read_row_group(number, columns=["kafka.offset", "kafka.time_ms"])["kafka"]
                rows = np.arange(len(kafka))
                found, times = (pc.struct_field(kafka, name) for name in ("offset", "time_ms"))
                offsets.append(rows if found.null_count else found.to_numpy())
                times_ms.append(pc.fill_null(times, 0).to_numpy())
                places.append(len(groups) * _MOST_ROWS + rows)
                groups.append((path, number))
    order = np.argsort(np.concatenate(offsets), kind="stable")
    columns = (np.concatenate(column)[order] for column in (offsets, times_ms, places))
    return _Stride(**dict(zip(("offsets", "times_ms", "places"), columns, strict=True)), groups=groups)


class _Groups:
    """The groups of rows read last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Path, int], _Rows] = OrderedDict()

    def row(self, path: Path, number: int, at: int) -> dict[str, Any]:
        """Raises UserError for a missing file."""
        with self._lock:
            if (rows := self._kept.get((path, number))) is None:
                with _opened(path) as file:
                    rows = self._kept[path, number] = _Rows(file.read_row_group(number))
            self._kept.move_to_end((path, number))
            while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return rows.row(at)


class _Rows:
    """A group of rows, some of them as Python objects."""

    def __init__(self, table: Any) -> None:
        self.num_bytes = table.nbytes
        self._table = table.combine_chunks()
        self._numbers = [name for name in _NUMBERS if name in table.schema.names]
        self._first, self._objects = 0, list[dict[str, Any]]()

    def row(self, at: int) -> dict[str, Any]:
        """One row as Python objects; tokens and log-probabilities as the bytes that a record holds."""
        if not self._first <= at < self._first + len(self._objects):
            self._first = at - at % _ROWS_AT_ONCE
            part = self._table.slice(self._first, _ROWS_AT_ONCE)
            self._objects = part.drop_columns(self._numbers).to_pylist()
            for name in self._numbers:
                for row, packed in zip(self._objects, _packed(part[name].chunk(0)), strict=True):
                    row[name] = packed
        return self._objects[at - self._first]


def _packed(lists: Any) -> Iterator[bytes | None]:
    """The little-endian numbers of each list."""
    values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
    for at, is_there in enumerate(lists.is_valid().to_pylist()):
        yield values[ends[at] : ends[at + 1]].tobytes() if is_there else None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as exc:
        raise UserError(
            f"{path} cannot be read ({str(exc).splitlines()[0]}).",
            hint="Another export may have replaced it: open the export again. `echoswarm export --verify` says whether it is whole.",
        ) from exc


class _ExportedRecord(Stored):
    """A row that is read on demand: a reader fetches more records than it uses."""

    __slots__ = ("row", "value_of")

    def __init__(self, offset: int, time_ms: int, row: Callable[[], dict[str, Any]], value_of: ValueOf) -> None:
        super().__init__(offset, None, None, None, time_ms)
        self.row, self.value_of = row, value_of

    def message(self, topic: str, partition: int) -> MemoryMessage:
        return _ExportedMessage(topic, partition, self)


class _ExportedMessage(MemoryMessage):
    """Makes key, headers and value from the row at each call."""

    __slots__ = ("_record",)
    _record: _ExportedRecord

    def __init__(self, topic: str, partition: int, record: _ExportedRecord) -> None:
        super().__init__(topic, partition, record.offset, _timestamp_ms=record.timestamp_ms)
        object.__setattr__(self, "_record", record)

    def key(self) -> bytes | None:
        key = self._record.row()["kafka"]["key"]
        return None if key is None else key.encode()

    def value(self) -> bytes | None:
        return self._record.value_of(self._record.row())

    def headers(self) -> list[tuple[str, bytes]] | None:
        return [(each["name"], (each["value"] or "").encode()) for each in self._record.row()["kafka"]["headers"] or ()]

    def __len__(self) -> int:
        return len(self.value() or b"")


def _value_of(record: type[Record] | None, run_id: str, row: Mapping[str, Any]) -> bytes | None:
    """The bytes of a row's record. `record` None: the row holds them. Of an unreadable record there are none."""
    if record is None:
        kept: bytes | None = row["value"]
        return kept
    if row["group_id"] is None:
        return b""
    plain: dict[str, Any] = {}
    for field in newest(record.SCHEMA).parsed["fields"]:
        name, kind = field["name"], field["type"]
        value: Any = run_id if name == "run_id" else row.get(_COLUMNS.get(name, name))
        is_map = isinstance(kind, dict) and kind["type"] == "map"
        # A column that an older release did not write gets the schema's default.
        plain[name] = field.get("default") if value is None else dict(value) if is_map else value
    return lock_file_codec().encode(converter_of(record).from_plain(plain))
