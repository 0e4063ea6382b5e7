"""The history of a run that goes on: the records that follow a range that was read, each yielded once.

    new trajectory ─▶ held ─▶ yielded as soon as it has a fate, or after `hold_s`
    new reward     ─▶ added to its held trajectory
    steps, drops   ─▶ the books, refreshed every second while a record is held

At most `_MOST_HELD` records are held; beyond that the oldest is yielded as it is. One thread, the caller's. Never ends by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_replay.history import History, HistoryRecord
from echo_replay.raw_log import RawLog
from echo_replay.record_filter import RecordFilter
from echo_replay.selection import Fate, Offsets, Selection, Steps
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.projection import Projection
from echo_schemas.records import Coordinates, Purpose, Reward, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES

_MOST_HELD = 10_000
_LOOK_AGAIN_S = 1.0
_REWARD = ("of.partition", "of.offset", "name", "value")
Place = tuple[int, int]


@dataclass(slots=True)
class _Held:
    """A record that waits for its fate until `until_s`."""

    raw: RawMessage
    trajectory: Trajectory | None
    until_s: float
    rewards: dict[str, float] = field(default_factory=dict)


def follow(history: History, selection: Selection, *, hold_s: float) -> Iterator[HistoryRecord]:
    """The new trajectories of `selection`, from the end of the last `history.read` on; never ends. Raises UserError for a selection of
    steps or offsets, which lie in the past; TransportError, RegistryError."""
    if isinstance(selection.range, Offsets | Steps):
        raise UserError("Offsets and steps lie in the past: there is nothing to follow.", hint="Follow versions, a group, or everything.")
    namespace = history.bus.namespace
    with (
        RawLog(history.bus, namespace.topic(TRAJECTORIES), profiles.READER) as trajectories,
        RawLog(history.bus, namespace.topic(REWARDS), profiles.READER) as rewards,
    ):
        judged_from = history.rewards_to or rewards.ends
        yield from _Following(history, selection, hold_s).records(
            trajectories.follow(history.read_to or trajectories.ends), rewards.follow(judged_from)
        )


class _Following:
    def __init__(self, history: History, selection: Selection, hold_s: float) -> None:
        self._history, self._clock, self._hold_s = history, history.bus.clock, hold_s
        # A new record has no fate yet: the filter of fates applies when the record is yielded.
        self._filter = RecordFilter(history.run_id, replace(selection, fates=frozenset()), history.fates, history.bus.codec)
        self._fates = selection.fates
        self._read_reward = Projection(Reward, _REWARD, history.bus.codec.ids).read
        self._held: OrderedDict[Place, _Held] = OrderedDict()
        self._early: OrderedDict[Place, dict[str, float]] = OrderedDict()
        self._look_s = 0.0

    def records(self, trajectories: Iterator[list[RawMessage]], rewards: Iterator[list[RawMessage]]) -> Iterator[HistoryRecord]:
        for messages, judged in zip(trajectories, rewards, strict=False):
            for raw in messages:
                self._hold(raw)
            for raw in judged:
                self._judge(raw)
            now_s = self._clock.monotonic_s()
            if self._held and now_s >= self._look_s:
                self._history.refresh()
                self._look_s = now_s + _LOOK_AGAIN_S
            yield from self._ready(now_s)

    def _hold(self, raw: RawMessage) -> None:
        if (passed := self._filter.look(raw)) is not None:
            place = (raw.partition() or 0, raw.offset() or 0)
            until_s = self._clock.monotonic_s() + self._hold_s
            self._held[place] = _Held(raw, passed[0], until_s, self._early.pop(place, {}))

    def _judge(self, raw: RawMessage) -> None:
        try:
            partition, offset, name, value = self._read_reward(raw.value())
        except InvalidRecord:
            return
        if value is None:
            return
        place = (partition, offset)
        found = self._held[place].rewards if place in self._held else self._early.setdefault(place, {})
        found.setdefault(name.decode(errors="replace"), value)
        if len(self._early) > _MOST_HELD:
            self._early.popitem(last=False)

    def _ready(self, now_s: float) -> Iterator[HistoryRecord]:
        """Held records that have a fate or have waited long enough, oldest first."""
        for place, held in list(self._held.items()):
            purpose, seq = (None, None) if held.trajectory is None else (held.trajectory.purpose, held.trajectory.seq)
            entry = self._history.fates.of(*place, purpose, seq)
            waits = entry.fate is Fate.OPEN or (purpose not in (None, Purpose.TRAIN) and not held.rewards)
            if waits and now_s < held.until_s and len(self._held) <= _MOST_HELD:
                continue
            del self._held[place]
            if not self._fates or entry.fate in self._fates:
                yield HistoryRecord(
                    where=Coordinates(partition=place[0], offset=place[1]),
                    time_ms=held.raw.timestamp()[1],
                    raw=held.raw,
                    trajectory=held.trajectory,
                    rewards=held.rewards,
                    entry=entry,
                )
