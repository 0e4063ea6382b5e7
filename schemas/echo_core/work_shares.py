"""How much work each of several unequal workers may have, and who gets the next piece. Pure.

    load_i                 what worker i has outstanding, what it does per second, how much it takes in hand
    allowance_i            rate_i · max(window / fastest rate, horizon), at least enough to keep it busy, at most window and capacity
    next worker            of those below their allowance: first one with nothing to do, then the one whose work is the soonest done

By Little's law outstanding / rate is the time that work spends with a worker. So the bound is one on time: whoever is five times slower
holds a fifth of the work, and what it holds is as old as what the fastest one holds, or as old as `horizon_s` allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

FEEDBACK_S = 0.4
"""From a worker that finishes to its next request in hand: its commit (0.2 s), the requester's look at it, and the way there."""

# A worker that would idle for less than this share of its time without a second request in hand gets none: it would only grow old there.
_TOLERATED_IDLE = 0.05
# A newcomer's share of the window, until it has shown what it does: if it is slow, this is what it keeps others waiting for.
_NEWCOMER_SHARE = 8
_NEWCOMER_LEAST = 2
# Of the time within which a sample is fresh enough, the part that it may spend with a worker; the rest is for its place in a batch.
_HORIZON_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker as whoever hands out work sees it. Counts are of groups.

    `groups_per_s`: per busy second; 0 while nothing is known. `capacity`: what it takes in hand at most; 0 while that is not known.
    """

    groups_per_s: float
    outstanding: int
    capacity: int = 0


def allowances(loads: Sequence[WorkerLoad], *, window: int, horizon_s: float = 0.0, alone: bool = False) -> list[int]:
    """How many groups each worker may have outstanding; at least 1 each.

    `window` is what the fastest one may have, and what anybody may have who is `alone`: nobody else could do it sooner.
    """
    fastest = max((load.groups_per_s for load in loads), default=0.0)
    found = []
    for load in loads:
        if alone:
            allowed = window
        elif load.groups_per_s <= 0:
            allowed = max(_NEWCOMER_LEAST, window // _NEWCOMER_SHARE)
        else:
            time_s = max(window / fastest, horizon_s)
            # Cut to the window before it is rounded: a rate that a worker made up may be anything.
            allowed = max(_least(load.groups_per_s), math.ceil(min(window, load.groups_per_s * time_s - 1e-9)))
        allowed = min(allowed, window, load.capacity or window)
        found.append(max(1, allowed))
    return found


class OpenWorkers:
    """Who gets the next groups, one after another, by a heap: with a thousand workers a look at all of them for each group would cost more
    than the group's request."""

    def __init__(self, loads: Sequence[WorkerLoad], *, window: int, horizon_s: float = 0.0, alone: bool = False) -> None:
        """`loads` as they are now; what is given from here on counts as outstanding. The rest as `allowances`."""
        fastest = max((load.groups_per_s for load in loads), default=0.0) or 1.0
        self._allowed = allowances(loads, window=window, horizon_s=horizon_s, alone=alone)
        self._outstanding = [load.outstanding for load in loads]
        # A newcomer counts as the fastest until it is known.
        self._rates = [load.groups_per_s or fastest for load in loads]
        self._heap = [self._turn(index) for index in range(len(loads)) if self._outstanding[index] < self._allowed[index]]
        heapify(self._heap)

    def take(self) -> int | None:
        """The index of the worker that gets the next group, which it now has; None while all have what they are allowed.

        One that has nothing comes first, so that nobody starves however slow; then the least outstanding / rate.
        """
        if not self._heap:
            return None
        index = self._heap[0][-1]
        self._outstanding[index] += 1
        if self._outstanding[index] < self._allowed[index]:
            heapreplace(self._heap, self._turn(index))
        else:
            heappop(self._heap)
        return index

    def _turn(self, index: int) -> tuple[bool, float, float, int]:
        outstanding, rate = self._outstanding[index], self._rates[index]
        return outstanding > 0, outstanding / rate, -rate, index


def horizon_of(budget: int, step_s: float | None) -> float:
    """Seconds that a group may spend with a worker under a staleness budget; 0 where no step was measured, or nothing may be stale."""
    return 0.0 if step_s is None else _HORIZON_SHARE * budget * step_s


def _least(groups_per_s: float) -> int:
    """What keeps a worker busy: one group in work, and those that it finishes before it can be given another."""
    return 1 + max(0, math.ceil(groups_per_s * FEEDBACK_S - _TOLERATED_IDLE))
