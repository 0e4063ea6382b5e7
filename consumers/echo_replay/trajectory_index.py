"""A few numbers of every trajectory record of one run, for an audit of millions of them.

    log ─▶ key tells the run ─▶ projection: seq, attempt, index, purpose, versions, checksum ─▶ columns, sorted by offset

About fifty bytes a record. Only the fields that an audit compares are read. The codec checks the rest, for the few records without a state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers
from echo_replay.steps import Ints
from echo_schemas.errors import InvalidRecord
from echo_schemas.headers import run_of
from echo_schemas.projection import Projection
from echo_schemas.records import Purpose, Trajectory, TrajectorySource
from echo_schemas.registry import SchemaIds

_FIELDS = ("run_id", "seq", "attempt", "index", "purpose", "min_version", "max_version", "weights_sha256", "source")
_TRAIN = Purpose.TRAIN.value.encode()
_LIVE = TrajectorySource.LIVE.value.encode()
_COLUMNS = ("offsets", "seqs", "indices", "attempts", "oldest", "newest", "checksums", "kinds")
# Numbers of a record that could not be read.
_NONE = -1


class Kind(IntEnum):
    """How the books count a record."""

    LIVE = 0
    OFFLINE = 1
    OTHER_PURPOSE = 2
    UNREADABLE = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionIndex:
    """The run's records of one partition in the order of their offsets; all arrays have one entry a record. `attempts`: `hash` of each
    attempt's token, valid within this process. `checksums` index `TrajectoryIndex.checksums`. `low`, `end`: the partition held the offsets
    [low, end)."""

    low: int
    end: int
    offsets: Ints
    seqs: Ints
    indices: Ints
    attempts: Ints
    oldest: Ints
    newest: Ints
    checksums: Ints
    kinds: npt.NDArray[np.int8]

    def find(self, offsets: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The position of each of `offsets` in the arrays, and whether the arrays hold it."""
        if not len(self.offsets):
            return np.zeros(len(offsets), np.int64), np.zeros(len(offsets), np.bool_)
        places = np.minimum(np.searchsorted(self.offsets, offsets), len(self.offsets) - 1)
        return places, self.offsets[places] == offsets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryIndex:
    """All partitions, and the checksums that their records name."""

    partitions: Mapping[int, PartitionIndex]
    checksums: tuple[str, ...]

    @property
    def num_records(self) -> int:
        """Number of the run's records."""
        return sum(len(each.offsets) for each in self.partitions.values())


class _Columns:
    """A partition while it is read. Arrays of C numbers: Python lists would take five times the memory."""

    __slots__ = ("add", "arrays")

    def __init__(self) -> None:
        self.arrays = {name: array("b" if name == "kinds" else "q") for name in _COLUMNS}
        self.add = tuple(self.arrays[name].append for name in _COLUMNS)

    def frozen(self, low: int, end: int) -> PartitionIndex:
        return PartitionIndex(low=low, end=end, **{name: np.array(values, values.typecode) for name, values in self.arrays.items()})


def index_trajectories(
    run_id: str, batches: Iterable[list[RawMessage]], ids: SchemaIds, *, lows: Mapping[int, int], ends: Mapping[int, int]
) -> TrajectoryIndex:
    """Index all messages of `trajectories`, in offset order within each partition. Raises RegistryError. Hot path: fifty thousand messages
    a second."""
    columns = {number: _Columns() for number in lows}
    adders = {number: each.add for number, each in columns.items()}
    checksums: dict[bytes, int] = {}
    read = Projection(Trajectory, _FIELDS, ids).read
    prefix, own = f"{run_id}/".encode(), run_id.encode()
    live, offline, other, unreadable = int(Kind.LIVE), int(Kind.OFFLINE), int(Kind.OTHER_PURPOSE), int(Kind.UNREADABLE)
    for batch in batches:
        for raw in batch:
            key = raw.key()
            # A key that begins with the run id is probably ours, and the body decides. For any other key look at the headers too.
            if (key is None or not key.startswith(prefix)) and (run_of(raw_headers(raw)) or run_id) != run_id:
                continue
            offset, seq, index, attempt, oldest, newest, checksum, kind = adders[raw.partition()]  # type: ignore[index]  # it has one
            try:
                run, a_seq, an_attempt, an_index, purpose, an_oldest, a_newest, a_checksum, source = read(raw.value())
            except InvalidRecord:
                offset(raw.offset())  # type: ignore[arg-type]  # a message has an offset
                for add in (seq, index, attempt, oldest, newest, checksum):
                    add(_NONE)
                kind(unreadable)
                continue
            if run != own:
                continue
            offset(raw.offset())  # type: ignore[arg-type]  # see above
            seq(a_seq)
            index(an_index)
            attempt(hash(an_attempt))
            oldest(an_oldest)
            newest(a_newest)
            checksum(checksums.setdefault(a_checksum, len(checksums)))
            kind(other if purpose != _TRAIN else live if source == _LIVE else offline)
    return TrajectoryIndex(
        partitions={number: each.frozen(lows[number], ends[number]) for number, each in columns.items()},
        checksums=tuple(checksum.decode(errors="replace") for checksum in checksums),
    )
