"""The past of one run: each trajectory with its rewards by name and its fate, for a range of the log.

    steps, drops, weights, dead letters ─▶ books ──┐
    selection ─▶ ranges of offsets ─▶ trajectories ─┼─▶ HistoryRecord: where, trajectory, rewards, fate
                                      rewards ──────┘

    with History(bus, "demo") as history:
        for record in history.read(Selection(range=Versions(100, 140))):
            print(record.where, record.fate, record.rewards)

Reads committed records only, writes nothing, joins no group, so it does not disturb a running run. Memory: the books (some forty bytes a
sample and drop), the rewards of one range of one partition, and the client's prefetched messages. One thread, the caller's; a second thread
reads through `beside()`.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.clock import MAX_CLOCK_ERROR_MS
from echo_bus.errors import DeadlineExceeded
from echo_replay.fates import BookEntry, Dropped, Fates
from echo_replay.ranges import Piece, ReadingPlan, plan_ranges
from echo_replay.raw_log import WHOLE, Range, RawLog
from echo_replay.record_filter import RecordFilter
from echo_replay.reward_columns import RewardColumns, RewardJoin
from echo_replay.run_log import DropsFollower, RunLog, StepsFollower, high_watermarks, read_dead_letters, read_manifests, unknown_run
from echo_replay.selection import Fate, Groups, Offsets, Selection, Steps, Where
from echo_schemas.converters import maker_of
from echo_schemas.records import Coordinates, Drop, Run, Trajectory
from echo_schemas.records.rollout import group_id_of
from echo_schemas.topics import DROPS, REWARDS, RUNS, TRAJECTORIES, WEIGHTS
from echo_streams.intake import Identity

# How long to wait for an open transaction; its records do not belong to the past yet.
_SETTLE_S = 3.0
# The same for a `refresh`, which the caller repeats.
_LOOK_S = 1.0
# Up to so many records or steps are fetched singly, more in bulk.
_FEW, _FEW_STEPS = 200, 8
# Messages of one partition held back at most while partitions are merged by time.
_MOST_WAITING = 4_000

T = TypeVar("T")
_Look = Callable[[RawMessage], T | None]
"""What is said of a message; None: it is not selected."""
_Found = tuple[RawMessage, Coordinates, T, Mapping[str, float]]

_OPEN_DROPS = "a transaction on drops is open: what it drops is shown as open"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """One trajectory record of the past. `raw`: its message. `time_ms`: the message's timestamp. `trajectory` is None if the record is
    unreadable. `rewards`: those with a value, by name."""

    where: Coordinates
    time_ms: int
    raw: RawMessage
    trajectory: Trajectory | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    entry: BookEntry

    @property
    def fate(self) -> Fate:
        return self.entry.fate

    @property
    def step(self) -> int | None:
        """The version whose step trained it, if it was trained."""
        return self.entry.step

    @property
    def drop(self) -> Dropped | None:
        """The reason for which it was dropped, if it was."""
        return self.entry.drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecoded:
    """One undecoded trajectory record of the past. `identity` is None if not even that can be read. `rewards`: by name; those without a
    value, if they were asked for, are NaN."""

    where: Coordinates
    raw: RawMessage
    identity: Identity | None
    rewards: Mapping[str, float]


_make_record, _make_undecoded, _make_place = maker_of(HistoryRecord), maker_of(Undecoded), maker_of(Coordinates)


class History:
    """The past of one run, its books read to their present end. A context manager: its clients are closed at the end."""

    def __init__(self, bus: Bus, run_id: str) -> None:
        """Raises UserError if the log knows no such run; DeadlineExceeded, TransportError."""
        self.bus = replace(bus, run_id=run_id)
        self.run_id = run_id
        self.log = RunLog(run_id)
        self.fates = Fates()
        self.notes: list[str] = []
        """Gaps in the books, a sentence each: fates may be missing there."""
        self.missing: list[str] = []
        """The parts of the last `read` that retention has removed, a sentence each."""
        self.num_planned = 0
        """How many records `read` looks at, at most; records of other runs and filtered ones count too."""
        self.read_to: dict[int, int] = {}
        """By partition: the end of `trajectories` at the last `read`. `following.follow` goes on from there."""
        self.num_later_rewards = 0
        """How many records of `rewards` the last `read` has left out, because they were written too late."""
        self.rewards_to: dict[int, int] = {}
        """The same of `rewards`, taken a little earlier, so that every reward of a later trajectory lies behind it."""
        with ExitStack() as clients:
            self._steps = clients.enter_context(closing(StepsFollower(self.bus, self.log)))
            self._drops = clients.enter_context(closing(DropsFollower(self.bus, self.log)))
            self._read_books()
            self._clients = clients.pop_all()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._clients.close()

    def beside(self) -> History:
        """The same books for another thread, which may `read` while this one reads and refreshes. The caller need not close it."""
        other = copy.copy(self)
        other.missing = []
        return other

    def refresh(self) -> bool:
        """Read the learner's new records; return whether there are any. Raises DeadlineExceeded, TransportError."""
        steps = self._steps.read()
        self.fates.add_steps(steps)
        if _OPEN_DROPS in self.notes:
            self.notes.remove(_OPEN_DROPS)
        drops = list(self._settled_drops(settle_s=_LOOK_S))
        self.fates.add_drops(drops)
        if steps:
            self._refresh_rest()
        return bool(steps or drops)

    def read(
        self,
        selection: Selection = Selection(),  # noqa: B008  frozen
        *,
        rewards: bool = True,
        by_time: bool = False,
        rewards_until_ms: int | None = None,
        clock_error_ms: int = MAX_CLOCK_ERROR_MS,
    ) -> Iterator[HistoryRecord]:
        """The records of `selection` that the log holds now, partition after partition, each in its order, or (`by_time`) by timestamp.

        `rewards_until_ms`: ignore rewards that were written later; None: read them to the end of the log. `clock_error_ms`: the largest
        difference between writers' clocks; on a busy topic a small one saves most of the reading. `missing` is complete before the first
        record comes. Raises UserError for a range that does not exist; DeadlineExceeded, TransportError, RegistryError.
        """
        groups = self._groups(selection.range)
        join = partial(_Rewards, self.bus, self.run_id, groups, until_ms=rewards_until_ms, clock_error_ms=clock_error_ms)
        look = RecordFilter(self.run_id, selection, self.fates, self.bus.codec).look
        for raw, where, (trajectory, entry), found in self._each(selection, look, join if rewards else None, by_time=by_time):
            yield _make_record(where=where, time_ms=raw.timestamp()[1], raw=raw, trajectory=trajectory, rewards=found, entry=entry)

    def undecoded(self, selection: Selection = Selection(), *, answered: str = "") -> Iterator[Undecoded]:  # noqa: B008  frozen
        """As `read`, without decoding, and without fates if no filter asks for them: half the work. `answered`: a reward of this name
        counts without a value too, as NaN."""
        join = partial(_Rewards, self.bus, self.run_id, self._groups(selection.range), answered=answered)
        look = RecordFilter(self.run_id, selection, self.fates, self.bus.codec).identify
        for raw, where, (identity,), found in self._each(selection, look, join):
            yield _make_undecoded(where=where, raw=raw, identity=identity, rewards=found)

    def _each(
        self, selection: Selection, look: _Look[T], joined: Callable[[], _Rewards] | None, *, by_time: bool = False
    ) -> Iterator[_Found[T]]:
        """The messages of `selection` that `look` passes, with what it says of them."""
        self.missing.clear()
        profile = self._profile(selection)
        with ExitStack() as stack:
            join = None if joined is None else joined()
            self.num_later_rewards = 0
            if join is not None:
                stack.enter_context(join)
                self.rewards_to = dict(join.ends)
            trajectories = stack.enter_context(RawLog(self.bus, self.bus.namespace.topic(TRAJECTORIES), profile))
            plan = plan_ranges(selection.range, self.log, self.fates, trajectories)
            self.missing += plan.missing
            self.read_to = dict(trajectories.ends)
            self.num_planned = plan.num_records
            for pieces in [plan.pieces] if by_time else [[piece] for piece in plan.pieces]:
                messages = _merged(trajectories, pieces) if by_time else _in_order(trajectories, pieces[0])
                yield from _found(plan, pieces, messages, look, join)
                self.num_later_rewards += 0 if join is None else join.num_later

    def _read_books(self) -> None:
        self._steps.read()
        goal = high_watermarks(self.bus, [DROPS, WEIGHTS])
        self.fates.add_steps(self.log.steps)
        self.fates.add_drops(self._settled_drops(goal))
        try:
            read_manifests(self.bus, self.log, goal, _SETTLE_S)
        except DeadlineExceeded:
            self.notes.append("a publication is going on: the newest version may be missing")
        self.log.runs += self.bus.newest(RUNS, Run, only=self.run_id).values()
        if not self.log.has_begun:
            raise unknown_run(self.bus, self.run_id)
        read_dead_letters(self.bus, self.log)
        self.fates.add_dead([*self.log.dead, *self.log.refused])
        self._note_gaps()

    def _refresh_rest(self) -> None:
        """Read new manifests, and new dead letters of the learner."""
        now = RunLog(self.run_id)
        read_dead_letters(self.bus, now)
        self.fates.add_dead([*now.dead, *now.refused])
        try:
            read_manifests(self.bus, now, high_watermarks(self.bus, [WEIGHTS]), _LOOK_S)
        except DeadlineExceeded:
            return  # a publication is going on; the next refresh reads it
        self.log.manifests = now.manifests

    def _settled_drops(self, goal: dict[tuple[str, int], int] | None = None, settle_s: float = _SETTLE_S) -> Iterator[Drop]:
        try:
            yield from self._drops.each(goal, settle_s)
        except DeadlineExceeded:
            if _OPEN_DROPS not in self.notes:
                self.notes.append(_OPEN_DROPS)

    def _note_gaps(self) -> None:
        if not self.log.has_whole_history:
            self.notes.append(f"retention has removed the reports before version {self.log.steps[0].version}")
        for step in self.log.steps:
            if step.missing:
                self.notes.append(f"the batch of version {step.version} cannot be read ({step.missing})")
        if self.log.has_lost_drops:
            self.notes.append("retention has removed drops")

    def _groups(self, where: Where) -> Iterable[str]:
        """The groups of a range that consists of few; else empty."""
        if isinstance(where, Groups):
            return where.group_ids
        if isinstance(where, Steps) and where.last - where.first < _FEW_STEPS:
            steps = [self.log.step_of(version) for version in range(where.first, where.last + 1)]
            return {group_id_of(self.run_id, seq) for step in steps if step is not None for seq in step.seqs.tolist()}
        return ()

    @staticmethod
    def _profile(selection: Selection) -> profiles.Properties:
        # For a few groups or records prefetching would be wasted.
        where = selection.range
        few = isinstance(where, Offsets) and sum(last - first + 1 for first, last in where.ranges.values()) <= _FEW
        few = few or (isinstance(where, Steps) and where.last - where.first < _FEW_STEPS)
        return profiles.GLIMPSE if few or isinstance(where, Groups) else WHOLE


class _Rewards(RawLog):
    """Rewards of pieces of `trajectories`, read from the first record's time to the end: a reward may be attached long afterwards."""

    def __init__(
        self,
        bus: Bus,
        run_id: str,
        groups: Iterable[str],
        *,
        until_ms: int | None = None,
        answered: str = "",
        clock_error_ms: int = MAX_CLOCK_ERROR_MS,
    ) -> None:
        """`groups`: their rewards are enough; empty: the rewards of all."""
        super().__init__(bus, bus.namespace.topic(REWARDS), WHOLE if until_ms is None else profiles.GLIMPSE)
        self._keys = frozenset(key.encode() for key in groups)
        self._join = partial(RewardJoin, run_id, bus.codec.ids, answered=answered, verifier=bus.verifier)
        self._until_ms, self._clock_error_ms = until_ms, clock_error_ms
        self.num_later = 0
        """How many records the last `columns` has left out, because they were written too late."""

    def columns(self, pieces: list[Piece], first_ms: int) -> dict[int, RewardColumns]:
        """By partition, the rewards of the records of `pieces`, whose oldest was written at `first_ms`."""
        starts = self.offsets_at(max(0, first_ms - self._clock_error_ms))
        # No reward is older than its record, whatever the clock of those who decided its fate said.
        until_ms = None if self._until_ms is None else max(self._until_ms, first_ms) + self._clock_error_ms
        ends = self.ends if until_ms is None else self.offsets_at(until_ms)
        joins: dict[int, RewardJoin] = {}
        for number in {piece.partition for piece in pieces if piece.partition in starts}:
            mine = [piece for piece in pieces if piece.partition == number]
            joins[number] = self._join(number, min(piece.first for piece in mine), max(piece.end for piece in mine))
        self.num_later = sum(self.ends[number] - ends[number] for number in joins)
        for batch in self.within({number: (starts[number], ends[number]) for number in joins}):
            by_partition: dict[int, list[RawMessage]] = {}
            for raw in batch:
                if not self._keys or raw.key() in self._keys:
                    by_partition.setdefault(raw.partition() or 0, []).append(raw)
            for number, messages in by_partition.items():
                joins[number].add(messages)
        return {number: join.columns() for number, join in joins.items()}


def _found(
    plan: ReadingPlan, pieces: list[Piece], messages: Iterator[RawMessage], look: _Look[T], join: _Rewards | None
) -> Iterator[_Found[T]]:
    """The selected messages of some pieces, with their rewards."""
    first = next(messages, None)
    if first is None:
        return
    columns = {} if join is None else join.columns(pieces, first.timestamp()[1])
    for raw in itertools.chain([first], messages):
        partition, offset = raw.partition() or 0, raw.offset() or 0
        if plan.wants(partition, offset) and (passed := look(raw)) is not None:
            rewards = columns[partition].of(offset) if partition in columns else {}
            yield raw, _make_place(partition=partition, offset=offset), passed, rewards


def _in_order(log: RawLog, piece: Piece) -> Iterator[RawMessage]:
    for batch in log.within({piece.partition: (piece.first, piece.end)}):
        yield from batch


def _merged(log: RawLog, pieces: list[Piece]) -> Iterator[RawMessage]:
    """By timestamp; equal ones by partition. A partition that is ahead of the slowest is paused."""
    ranges: dict[int, list[Range]] = {}
    for piece in pieces:
        ranges.setdefault(piece.partition, []).append((piece.first, piece.end))
    waiting: dict[int, deque[RawMessage]] = {number: deque() for number in ranges}
    paused: set[int] = set()
    heads: list[tuple[int, int]] = []
    for batch in log.fetches(ranges):
        for raw in batch.messages:
            number = raw.partition() or 0
            if not waiting[number]:
                heapq.heappush(heads, (raw.timestamp()[1], number))
            waiting[number].append(raw)
        for number in sorted(set(waiting) - paused):
            if len(waiting[number]) > _MOST_WAITING and number in batch.left:
                log.pause(number)
                paused.add(number)
        # The oldest message may go out once no partition can deliver an older one.
        while heads and all(waiting[number] or number not in batch.left for number in waiting):
            _, number = heapq.heappop(heads)
            yield waiting[number].popleft()
            if waiting[number]:
                heapq.heappush(heads, (waiting[number][0].timestamp()[1], number))
            if number in paused and len(waiting[number]) < _MOST_WAITING // 2:
                log.resume(number)
                paused.discard(number)
