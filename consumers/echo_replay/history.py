"""The past of one run: each trajectory with its rewards by name and its fate, for a range of the log.

    steps, drops, weights, dead letters ─▶ books ──┐
    selection ─▶ ranges of offsets ─▶ trajectories ─┼─▶ Told: where, trajectory, rewards, fate
                                      rewards ──────┘

    with open_history(bus, "demo") as history:
        for told in history.read(Selection(range=Versions(100, 140))):
            print(told.where, told.fate, told.rewards)

Reads committed records only, writes nothing, joins no group: a going run is not disturbed. Memory: the books (some forty bytes a sample and
drop), the rewards of one range of one partition, and what the client has fetched ahead. One thread, the caller's; another one that reads
meanwhile takes `beside()`.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from types import TracebackType

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.clock import MAX_CLOCK_ERROR_MS
from echo_bus.errors import DeadlineExceeded
from echo_replay.fates import BookEntry, Dropped, Fates
from echo_replay.ranges import Piece, ReadingPlan, plan_ranges
from echo_replay.raw_log import WHOLE, RawLog
from echo_replay.reward_columns import RewardColumns, RewardJoin
from echo_replay.run_log import DropsFollower, RunLog, StepsFollower, high_watermarks, read_dead_letters, read_manifests
from echo_replay.selection import Fate, Groups, Offsets, Selection, Steps
from echo_replay.sieve import Sieve
from echo_schemas.errors import UserError
from echo_schemas.records import Coordinates, Drop, Run, Trajectory
from echo_schemas.topics import DROPS, REWARDS, RUNS, TRAJECTORIES, WEIGHTS

# How long an open transaction is waited for; what it holds is not in the past yet.
_SETTLE_S = 3.0
# The same for whoever looks again soon anyway.
_LOOK_S = 1.0
# Records, and steps, that are fetched by themselves rather than in bulk.
_FEW, _FEW_STEPS = 200, 8
# Messages of one partition that wait for those of another while they are merged by time.
_MOST_WAITING = 4_000

_OPEN_DROPS = "a transaction on drops is open: what it drops is shown as open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One trajectory record of the past. `raw`: the message as it lies on the log. `time_ms`: the message's own timestamp.

    `trajectory` is None where nobody can read the record, and where nobody asked for it. `rewards`: those that have a value, by name.
    """

    where: Coordinates
    time_ms: int
    raw: RawMessage
    trajectory: Trajectory | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    entry: BookEntry

    @property
    def fate(self) -> Fate:
        """What became of it."""
        return self.entry.fate

    @property
    def step(self) -> int | None:
        """The version that was made of it, if it was trained."""
        return self.entry.step

    @property
    def drop(self) -> Dropped | None:
        """Why it was not trained, if it was dropped."""
        return self.entry.drop


class History:
    """Made by `open_history`. A context manager: its clients are closed at the end."""

    def __init__(self, bus: Bus, run_id: str) -> None:
        """Raises UserError if the log knows no such run; DeadlineExceeded, TransportError."""
        self.bus = replace(bus, run_id=run_id)
        self.run_id = run_id
        self.log = RunLog(run_id)
        self.fates = Fates()
        self.notes: list[str] = []
        """What the books do not know: fates may be missing for it."""
        self.missing: list[str] = []
        """What `read` was asked for and retention has removed, a sentence each."""
        self.num_planned = 0
        """How many records at most `read` looks at: those of other runs and what a filter leaves out are among them."""
        self.read_to: dict[int, int] = {}
        """Where each partition of `trajectories` ended for the last `read`: from there on the history is followed (`following.follow`)."""
        self.rewards_to: dict[int, int] = {}
        """The same of `rewards`, looked at a little earlier: what judges a later trajectory lies behind it."""
        self._steps = StepsFollower(self.bus, self.log)
        try:
            self._drops = DropsFollower(self.bus, self.log)
        except BaseException:  # whatever ends it: the client must not outlive it
            self._steps.close()
            raise
        try:
            self._read_books()
        except BaseException:  # see above
            self.close()
            raise

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the clients."""
        self._steps.close()
        self._drops.close()

    def beside(self) -> History:
        """The same books for another thread, which may `read` while this one reads and refreshes; it has nothing to close."""
        other = copy.copy(self)
        other.missing = []
        return other

    def refresh(self) -> bool:
        """Read what the learner has said since; whether it has said anything. Raises DeadlineExceeded, TransportError."""
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
        decodes: bool = True,
        answered: str = "",
        clock_error_ms: int = MAX_CLOCK_ERROR_MS,
    ) -> Iterator[Told]:
        """What the log holds of `selection` now, partition after partition in the order of each, or (`by_time`) merged by timestamp.

        `rewards_until_ms`: rewards that were written later are not looked for; None: to the end of the log. `decodes` False: trajectories
        are left undecoded. `answered`: of the reward of this name a record without a value counts too, as NaN. `clock_error_ms`: how far
        the clocks of those who write may differ; where much is written, a small one spares reading most of it.
        What retention has removed of it is in `missing` before the first one comes. Raises UserError for a range that is not there;
        DeadlineExceeded, TransportError, RegistryError.
        """
        self.missing.clear()
        profile = self._profile(selection)
        reach = _Reach(until_ms=rewards_until_ms, answered=answered, clock_error_ms=clock_error_ms)
        with ExitStack() as stack:
            join = stack.enter_context(closing(_Rewards(self.bus, self.run_id, selection, profile, reach))) if rewards else None
            if join is not None:
                self.rewards_to = dict(join.ends)
            trajectories = stack.enter_context(RawLog(self.bus, self.bus.namespace.topic(TRAJECTORIES), profile))
            plan = plan_ranges(selection.range, self.log, self.fates, trajectories)
            self.missing += plan.missing
            self.read_to = dict(trajectories.ends)
            self.num_planned = plan.num_records
            sieve = Sieve(self.run_id, selection, self.fates, self.bus.codec, decodes=decodes)
            for pieces in [plan.pieces] if by_time else [[piece] for piece in plan.pieces]:
                messages = _merged(trajectories, pieces) if by_time else _in_order(trajectories, pieces[0])
                yield from _told(plan, pieces, messages, sieve, join)

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
            raise UserError(
                f"The namespace {self.bus.namespace.name!r} knows no run {self.run_id!r}.",
                hint="`echoswarm tail runs --all-runs` shows its runs.",
            )
        read_dead_letters(self.bus, self.log)
        self.fates.add_dead([*self.log.dead, *self.log.refused])
        self._note_gaps()

    def _refresh_rest(self) -> None:
        """Versions that were published since, and what the learner could not read."""
        now = RunLog(self.run_id)
        read_dead_letters(self.bus, now)
        self.fates.add_dead([*now.dead, *now.refused])
        try:
            read_manifests(self.bus, now, high_watermarks(self.bus, [WEIGHTS]), _LOOK_S)
        except DeadlineExceeded:
            return  # a publication is going on: the next time says it
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
        if any(self.log.lows.get(DROPS.name, {}).values()):
            self.notes.append("retention has removed drops")

    @staticmethod
    def _profile(selection: Selection) -> profiles.Properties:
        # Of a few groups or records little is wanted, and what is fetched ahead is fetched for nothing.
        where = selection.range
        few = isinstance(where, Offsets) and sum(last - first + 1 for first, last in where.ranges.values()) <= _FEW
        few = few or (isinstance(where, Steps) and where.last - where.first < _FEW_STEPS)
        return profiles.GLIMPSE if few or isinstance(where, Groups) else WHOLE


def open_history(bus: Bus, run_id: str) -> History:
    """The past of one run, its books read to where they end now. Raises UserError if the log knows no such run; DeadlineExceeded,
    TransportError.
    """
    return History(bus, run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """Which rewards are looked for: see `History.read`."""

    until_ms: int | None
    answered: str
    clock_error_ms: int


class _Rewards:
    """Rewards of pieces of `trajectories`, read from the time of the first record on to the end: one may be attached long afterwards."""

    def __init__(self, bus: Bus, run_id: str, selection: Selection, profile: profiles.Properties, reach: _Reach) -> None:
        keys = selection.range.group_ids if isinstance(selection.range, Groups) else ()
        self._keys = frozenset(key.encode() for key in keys)  # of the groups that are wanted; empty: all
        self._ids, self._run_id, self._reach, self._verifier = bus.codec.ids, run_id, reach, bus.verifier
        self._log = RawLog(bus, bus.namespace.topic(REWARDS), profile)

    @property
    def ends(self) -> Mapping[int, int]:
        """Where each partition of `rewards` ended when it was opened."""
        return self._log.ends

    def columns(self, pieces: list[Piece], first_ms: int) -> dict[int, RewardColumns]:
        """By partition, for records of `pieces`, of which the oldest was written at `first_ms`."""
        starts = self._log.offsets_at(max(0, first_ms - self._reach.clock_error_ms))
        ends = self._log.ends if self._reach.until_ms is None else self._log.offsets_at(self._reach.until_ms + self._reach.clock_error_ms)
        joins: dict[int, RewardJoin] = {}
        for number in {piece.partition for piece in pieces if piece.partition in starts}:
            mine = [piece for piece in pieces if piece.partition == number]
            span = min(piece.first for piece in mine), max(piece.end for piece in mine)
            joins[number] = RewardJoin(self._run_id, self._ids, number, *span, answered=self._reach.answered, verifier=self._verifier)
        for batch in self._log.within({number: (starts[number], ends[number]) for number in joins}):
            by_partition: dict[int, list[RawMessage]] = {}
            for raw in batch:
                if not self._keys or raw.key() in self._keys:
                    by_partition.setdefault(raw.partition() or 0, []).append(raw)
            for number, messages in by_partition.items():
                joins[number].add(messages)
        return {number: join.columns() for number, join in joins.items()}

    def close(self) -> None:
        self._log.close()


def _told(
    plan: ReadingPlan, pieces: list[Piece], messages: Iterator[RawMessage], sieve: Sieve, join: _Rewards | None
) -> Iterator[Told]:  # fmt: skip
    """The messages of some pieces that are wanted, with their rewards."""
    first = next(messages, None)
    if first is None:
        return
    columns = {} if join is None else join.columns(pieces, first.timestamp()[1])
    for raw in itertools.chain([first], messages):
        partition, offset = raw.partition() or 0, raw.offset() or 0
        if not plan.wants(partition, offset) or (passed := sieve.look(raw)) is None:
            continue
        yield Told(
            where=Coordinates(partition=partition, offset=offset),
            time_ms=raw.timestamp()[1],
            raw=raw,
            trajectory=passed[0],
            rewards=columns[partition].of(offset) if partition in columns else {},
            entry=passed[1],
        )


def _in_order(log: RawLog, piece: Piece) -> Iterator[RawMessage]:
    for batch in log.within({piece.partition: (piece.first, piece.end)}):
        yield from batch


def _merged(log: RawLog, pieces: list[Piece]) -> Iterator[RawMessage]:
    """By timestamp; equal ones by partition. Of each partition only so much is kept as the slowest one makes necessary."""
    ranges = {piece.partition: (piece.first, piece.end) for piece in pieces if piece.first < piece.end}
    waiting: dict[int, deque[RawMessage]] = {number: deque() for number in ranges}
    paused: set[int] = set()
    heads: list[tuple[int, int]] = []
    for batch in log.stretches(ranges):
        for raw in batch.messages:
            number = raw.partition() or 0
            if not waiting[number]:
                heapq.heappush(heads, (raw.timestamp()[1], number))
            waiting[number].append(raw)
        for number in sorted(set(waiting) - paused):
            if len(waiting[number]) > _MOST_WAITING and number in batch.left:
                log.pause(number)
                paused.add(number)
        # The oldest may go as soon as no partition can have an older one.
        while heads and all(waiting[number] or number not in batch.left for number in waiting):
            _, number = heapq.heappop(heads)
            yield waiting[number].popleft()
            if waiting[number]:
                heapq.heappush(heads, (waiting[number][0].timestamp()[1], number))
            if number in paused and len(waiting[number]) < _MOST_WAITING // 2:
                log.resume(number)
                paused.discard(number)
