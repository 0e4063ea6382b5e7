"""From a selection to offsets: the pieces of partitions to read, and the parts of them that retention has removed.

Versions  the time at which the first of them was published, by the cluster's time index
Steps     the coordinates in the reports
Groups    the key's partition; there the coordinates in the books, and all records that the learner has not read yet
Times     the cluster's time index
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from echo_bus.clock import MAX_CLOCK_ERROR_MS
from echo_replay.fates import Fates
from echo_replay.run_log import RunLog
from echo_replay.selection import Everything, Groups, Offsets, Steps, Times, Versions, Where
from echo_replay.steps import Ints
from echo_schemas.errors import UserError
from echo_schemas.headers import number_of
from echo_schemas.partitioning import partition_of

# Records of a group that lie further apart are fetched singly.
_NEAR = 500


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets [first, end) of one partition."""

    partition: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The pieces to read. `places`: by partition, the only offsets to read in the pieces, ascending; None: all. `missing`: sentences."""

    pieces: list[Piece]
    places: Mapping[int, Ints] | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def num_records(self) -> int:
        """Number of offsets to read."""
        if self.places is not None:
            return sum(len(offsets) for offsets in self.places.values())
        return sum(piece.end - piece.first for piece in self.pieces)

    def wants(self, partition: int, offset: int) -> bool:
        """Whether `places` names this message of a piece."""
        if self.places is None:
            return True
        offsets = self.places.get(partition)
        if offsets is None:
            return False
        at = int(offsets.searchsorted(offset))
        return at < len(offsets) and int(offsets[at]) == offset


class Bounds(Protocol):
    """Bounds of a topic's partitions. Implemented by `RawLog`."""

    num_partitions: int
    lows: Mapping[int, int]
    ends: Mapping[int, int]

    def offsets_at(self, time_ms: int) -> Mapping[int, int]:
        """By partition: the first offset whose record is not older than `time_ms`; where all records are older, the end."""


def plan_ranges(where: Where, log: RunLog, fates: Fates, bounds: Bounds) -> ReadingPlan:
    """Raises UserError if the whole range is missing: never published, never trained, or removed by retention."""
    match where:
        case Everything():
            return _from(bounds, dict(bounds.lows), dict.fromkeys(bounds.lows, 0))
        case Offsets():
            return _of_offsets(where, bounds)
        case Times():
            return _of_times(where, bounds)
        case Versions():
            return _of_versions(where, log, bounds)
        case Steps():
            return _of_steps(where, log, fates, bounds)
        case Groups():
            return _of_groups(where, log, fates, bounds)


def published(log: RunLog) -> dict[int, int]:
    """By published version, the time of its publication (Unix, ms)."""
    return {manifest.version: manifest.created_ms for _, is_current, manifest in log.manifests if not is_current}


def _from(bounds: Bounds, starts: Mapping[int, int], wanted: Mapping[int, int], ends: Mapping[int, int] | None = None) -> ReadingPlan:
    """Every partition from `starts` on. Offsets from `wanted` to the log's beginning are missing."""
    missing = [
        f"Retention has removed offsets {wanted[number]} to {low - 1} of partition {number} of trajectories."
        for number, low in sorted(bounds.lows.items())
        if wanted.get(number, low) < low
    ]
    last = ends or bounds.ends
    pieces = [Piece(number, start, last[number]) for number, start in sorted(starts.items()) if start < last[number]]
    return ReadingPlan(pieces=pieces, missing=missing)


def _of_offsets(where: Offsets, bounds: Bounds) -> ReadingPlan:
    for number, (first, _) in where.ranges.items():
        if number not in bounds.ends:
            raise UserError(
                f"There is no partition {number} of trajectories.", hint=f"They are numbered from 0 to {bounds.num_partitions - 1}."
            )
        if first >= bounds.ends[number]:
            raise UserError(
                f"Partition {number} of trajectories has no offset {first}.",
                hint=f"It holds {bounds.lows[number]} to {bounds.ends[number] - 1}."
                if bounds.ends[number] > bounds.lows[number]
                else "It is empty.",
            )
    if gone := [number for number, (_, last) in where.ranges.items() if last < bounds.lows[number]]:
        first, last = where.ranges[gone[0]]
        raise UserError(
            f"Retention has removed offsets {first} to {last} of partition {gone[0]} of trajectories.",
            hint=f"The partition begins at {bounds.lows[gone[0]]}.",
        )
    starts = {number: max(first, bounds.lows[number]) for number, (first, _) in where.ranges.items()}
    ends = {number: min(last + 1, bounds.ends[number]) for number, (_, last) in where.ranges.items()}
    return _from(bounds, starts, {number: first for number, (first, _) in where.ranges.items()}, ends)


def _of_times(where: Times, bounds: Bounds) -> ReadingPlan:
    starts = dict(bounds.lows) if where.since_ms is None else dict(bounds.offsets_at(where.since_ms))
    ends = dict(bounds.ends)
    if where.until_ms is not None:
        behind = bounds.offsets_at(where.until_ms + 1)
        if all(behind[number] <= low for number, low in bounds.lows.items()) and any(bounds.lows.values()):
            raise UserError(
                f"Retention has removed everything that was written up to {_said(where.until_ms)}.",
                hint="Ask for a later time; `echoswarm tail trajectories` shows the newest records.",
            )
        # Writers' clocks differ, so older records may follow newer ones. The filter compares each record's time again.
        ends = dict(bounds.offsets_at(where.until_ms + MAX_CLOCK_ERROR_MS))
    removed = {number: 0 if starts[number] == low else low for number, low in bounds.lows.items()}
    return _from(bounds, starts, removed, ends)


def _of_versions(where: Versions, log: RunLog, bounds: Bounds) -> ReadingPlan:
    times = published(log)
    if not any(where.first <= version <= where.last for version in times):
        newest = f"The newest of {log.run_id} is {max(times)}." if times else f"{log.run_id} has published none yet."
        was = f"Version {where.first} was" if where.first == where.last else f"The versions {where.first} to {where.last} were"
        raise UserError(f"{was} never published.", hint=newest)
    before = [version for version in times if version <= where.first]
    if where.first == 0 or not before:
        return _from(bounds, dict(bounds.lows), dict.fromkeys(bounds.lows, 0))
    starts = bounds.offsets_at(max(0, times[max(before)] - MAX_CLOCK_ERROR_MS))
    return _from(bounds, starts, {number: 0 if starts[number] == low else low for number, low in bounds.lows.items()})


def _of_steps(where: Steps, log: RunLog, fates: Fates, bounds: Bounds) -> ReadingPlan:
    steps = [step for step in log.steps if where.first <= step.version <= where.last]
    if not steps:
        named = f"step {where.first}" if where.first == where.last else f"steps {where.first} to {where.last}"
        known = f"It has {log.steps[0].version} to {log.tip}." if log.steps else "It has none yet."
        raise UserError(f"The log has no report of {named} of {log.run_id}.", hint=known)
    missing = [f"The batch of step {step.version} is gone: {step.missing}." for step in steps if step.missing]
    places = fates.places_of_steps(where.first, where.last)
    pieces = []
    for number, offsets in places.items():
        if number not in bounds.lows:
            missing.append(f"The steps name partition {number} of trajectories, which is not there.")
            continue
        low = bounds.lows[number]
        if num_gone := int((offsets < low).sum()):
            missing.append(f"Retention has removed {num_gone} samples of partition {number}, at offsets {offsets[0]} to {low - 1}.")
        if int(offsets[-1]) >= low:
            pieces.append(Piece(number, max(low, int(offsets[0])), int(offsets[-1]) + 1))
    return ReadingPlan(pieces=pieces, places=places, missing=missing)


def _of_groups(where: Groups, log: RunLog, fates: Fates, bounds: Bounds) -> ReadingPlan:
    read_to = log.read_to
    pieces: set[Piece] = set()
    missing = []
    for group_id in sorted(where.group_ids):
        number = partition_of(group_id, bounds.num_partitions)
        low, end = bounds.lows[number], bounds.ends[number]
        seq = number_of(group_id.rpartition("/")[2])
        known = [] if seq is None else [offset for partition, offset in fates.places_of_seq(seq) if partition == number]
        if gone := [offset for offset in known if offset < low]:
            missing.append(f"Retention has removed {len(gone)} records of {group_id}, the last at {number}:{gone[-1]}.")
        left = [offset for offset in known if offset >= low]
        if not known:
            pieces.add(Piece(number, low, end))
            continue
        for first, last in _clusters(left):
            pieces.add(Piece(number, first, last + 1))
        unread = max(read_to.get(number, low), low, (left[-1] + 1) if left else low)
        pieces.add(Piece(number, min(unread, end), end))
    return ReadingPlan(pieces=_joined(pieces), missing=missing)


def _joined(pieces: set[Piece]) -> list[Piece]:
    """In order, overlapping pieces joined: groups lie among one another, and each record is to be read once."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.partition, piece.first)):
        if found and found[-1].partition == piece.partition and piece.first <= found[-1].end:
            found[-1] = Piece(piece.partition, found[-1].first, max(found[-1].end, piece.end))
        elif piece.first < piece.end:
            found.append(piece)
    return found


def _clusters(offsets: list[int]) -> list[tuple[int, int]]:
    """Stretches (first, last) of ascending offsets, each fetched at once."""
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and offset - found[-1][1] <= _NEAR:
            found[-1] = (found[-1][0], offset)
        else:
            found.append((offset, offset))
    return found


def _said(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
