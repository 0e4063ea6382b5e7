"""The share of work of each of several unequal workers, and the worker that gets the next group. Pure.

    load_i                 worker i's outstanding groups, groups per second, capacity
    allowance_i            rate_i · max(window / fastest rate, horizon), at least enough to keep it busy, at most window and capacity
    next worker            of those below their allowance: first one without work, then the one that finishes its work soonest

By Little's law outstanding / rate is the time that a group spends with a worker. So the allowance bounds time: a worker that is five times
slower holds a fifth of the work, and its groups are as old as the fastest worker's, or as old as `horizon_s` allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

FEEDBACK_S = 0.4
"""From the end of a worker's group to its next request in hand: its commit (0.2 s), the requester's look at it, and the transfer."""

# A worker that would idle for less than this share of its time gets no second request: it would only age there.
_TOLERATED_IDLE = 0.05
# A newcomer gets this part of the window until its rate is known: if it is slow, the learner waits for no more groups than these.
_NEWCOMER_SHARE = 8
_NEWCOMER_LEAST = 2
# The part of the time limit of freshness that a sample may spend with a worker; the rest is for waiting for its batch.
_HORIZON_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker, as the dispatcher sees it. Counts are of groups. `groups_per_s`: per busy second; 0 while unknown. `capacity`: groups in
    hand at most; 0 while unknown."""

    groups_per_s: float
    outstanding: int
    capacity: int = 0


def allowances(loads: Sequence[WorkerLoad], *, window: int, horizon_s: float = 0.0, alone: bool = False) -> list[int]:
    """The number of groups that each worker may have outstanding; at least 1 each. `window`: the number for the fastest worker, and for
    each one if the workers are `alone`: no other worker could be sooner."""
    fastest = max((load.groups_per_s for load in loads), default=0.0)
    found = []
    for load in loads:
        if alone:
            allowed = window
        elif load.groups_per_s <= 0:
            allowed = max(_NEWCOMER_LEAST, window // _NEWCOMER_SHARE)
        else:
            time_s = max(window / fastest, horizon_s)
            # Cut to the window before rounding: a worker may report any rate.
            allowed = max(_least(load.groups_per_s), math.ceil(min(window, load.groups_per_s * time_s - 1e-9)))
        allowed = min(allowed, window, load.capacity or window)
        found.append(max(1, allowed))
    return found


class OpenWorkers:
    """Chooses the worker of each next group, by a heap: with a thousand workers comparing all of them for each group would cost more than
    the group's request."""

    def __init__(self, loads: Sequence[WorkerLoad], *, window: int, horizon_s: float = 0.0, alone: bool = False) -> None:
        """`loads`: the present ones; each group given by `take` counts as outstanding. Other arguments as for `allowances`."""
        fastest = max((load.groups_per_s for load in loads), default=0.0) or 1.0
        self._allowed = allowances(loads, window=window, horizon_s=horizon_s, alone=alone)
        self._outstanding = [load.outstanding for load in loads]
        # A newcomer counts as the fastest until it is known.
        self._rates = [load.groups_per_s or fastest for load in loads]
        self._heap = [self._turn(index) for index in range(len(loads)) if self._outstanding[index] < self._allowed[index]]
        heapify(self._heap)

    def take(self) -> int | None:
        """Give the next group to a worker and return its index; None while all workers have their allowance. A worker without work comes
        first, so that slow workers do not starve; then the one with the least outstanding / rate."""
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
    """Seconds that a group may spend with a worker under a staleness budget; 0 if no step was measured, or the budget is 0."""
    return 0.0 if step_s is None else _HORIZON_SHARE * budget * step_s


def _least(groups_per_s: float) -> int:
    """The groups that keep a worker busy: one in work, and those that it finishes before it can get another."""
    return 1 + max(0, math.ceil(groups_per_s * FEEDBACK_S - _TOLERATED_IDLE))
