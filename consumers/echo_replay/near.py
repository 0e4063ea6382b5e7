"""Reads a few records of the past with the rewards that were written about the same time.

A run with a thousand rewards a second has written a million of them since, and a reward may be attached long afterwards: reading all of
them takes seconds, so only those who ask for late rewards wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from echo_bus.clock import MAX_CLOCK_ERROR_MS
from echo_replay.fates import BookEntry
from echo_replay.history import History, HistoryRecord
from echo_replay.selection import Groups, Offsets, Selection, Steps, Where
from echo_schemas.headers import number_of

# Rewards are read up to this time after a sample's fate was decided, and with this allowance for the writers' clocks.
_LATE_MS, _CLOCK_ERROR_MS = 60_000, 5_000


def read_near(history: History, selection: Selection, *, late: bool = False) -> Iterator[HistoryRecord]:
    """The records of `selection` by their timestamps, with the rewards of the minute after their fates were decided, or (`late`) with all
    that the log holds. While a fate is open, and for a range of versions or times, all are read. Raises as `History.read`."""
    decided_ms = None if late else _decided_ms(history, selection.range)
    until_ms = None if decided_ms is None else decided_ms + _LATE_MS
    clock_error_ms = MAX_CLOCK_ERROR_MS if late else _CLOCK_ERROR_MS
    return history.read(selection, by_time=True, rewards_until_ms=until_ms, clock_error_ms=clock_error_ms)


def _decided_ms(history: History, where: Where) -> int | None:
    """When the last fate of the range was decided; None if one is open, or the range does not say which records it holds."""
    match where:
        case Steps():
            return max((step.report.time_ms for step in list(history.log.steps) if where.first <= step.version <= where.last), default=None)
        case Groups():
            seqs = [number_of(group_id.rpartition("/")[2]) for group_id in where.group_ids]
            if None in seqs:
                return None
            places = [place for seq in seqs if seq is not None for place in history.fates.places_of_seq(seq)]
            return _last_ms(history, (history.fates.of(*place, None) for place in places))
        case Offsets():
            singles = {number: first for number, (first, last) in where.ranges.items() if first == last}
            if len(singles) < len(where.ranges):
                return None
            return _last_ms(history, (history.fates.of(*place, None) for place in singles.items()))
        case _:
            return None


def _last_ms(history: History, entries: Iterable[BookEntry]) -> int | None:
    times_ms = [_time_of(history, entry) for entry in entries]
    known_ms = [time_ms for time_ms in times_ms if time_ms is not None]
    return max(known_ms, default=None) if len(known_ms) == len(times_ms) else None


def _time_of(history: History, entry: BookEntry) -> int | None:
    step = None if entry.step is None else history.log.step_of(entry.step)
    decided = entry.drop if step is None else step.report
    return None if decided is None else decided.time_ms
