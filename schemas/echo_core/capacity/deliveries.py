"""Compares the trajectories that workers claim in heartbeats with those that the learner has read of each. Pure.

heartbeat  ─▶ claimed:   rate · busy seconds since the previous heartbeat
step report ─▶ delivered: trajectories of the worker that the learner has read since the previous report

A learner that does not wait may leave records unread, so it reads only a part of every worker's: a worker is compared with the best of the
others. A worker without others is compared with its own claim, and only if the learner has waited.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from echo_core.capacity.costs import grown
from echo_schemas.records import WorkerShare, WorkerStatus

# So many reports together: the trajectories under way at a report are few beside those of five.
_REPORTS = 5
# A claim of fewer groups is not compared: one group may come a report later.
_LEAST_GROUPS = 4
# Less than a third of the claim is no error of measurement: rates vary by tens of per cent.
_FACTOR = 3.0
# Bounds memory: a writer of `workers` may invent names.
_MOST_WORKERS = 10_000


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From one report to the next, in trajectories by worker."""

    claimed: Mapping[str, float]
    delivered: Mapping[str, int]
    has_waited: bool


class Deliveries:
    """Claimed and delivered trajectories over the last reports. Not thread-safe."""

    def __init__(self, *, group_size: int) -> None:
        self._least = _LEAST_GROUPS * group_size
        self._busy_s: dict[str, float] = {}
        self._claimed: dict[str, float] = {}
        self._stretches: deque[_Stretch] = deque(maxlen=_REPORTS)

    def heard(self, status: WorkerStatus) -> None:
        """Count a worker's newest heartbeat; some heartbeats may be missed."""
        before_s = self._busy_s.pop(status.worker_id, None)
        self._busy_s[status.worker_id] = status.busy_s
        if len(self._busy_s) > _MOST_WORKERS:
            del self._busy_s[next(iter(self._busy_s))]
        if before_s is None:
            return
        claimed = status.rollouts_per_s * grown(status.busy_s, before_s)
        if claimed > 0 and math.isfinite(claimed):
            self._claimed[status.worker_id] = self._claimed.get(status.worker_id, 0.0) + claimed

    def reported(self, shares: Iterable[WorkerShare], *, has_waited: bool) -> None:
        """Count a step report, and whether the learner waited for its batch. A report without any delivery is of an earlier release, and is
        ignored."""
        claimed, self._claimed = self._claimed, {}
        delivered = {share.worker_id: share.delivered for share in shares}
        if any(delivered.values()):
            self._stretches.append(_Stretch(claimed, delivered, has_waited))

    def believed_shares(self) -> dict[str, float]:
        """By worker that delivers far less than it claims: the credible share of its rate.

        Five reports; a claims 1000 and delivers 950, b claims 1000 and delivers 100: {"b": 0.105}: 0.1, by the 0.95 that a delivers."""
        stretches = self._stretches
        if len(stretches) < _REPORTS:
            return {}
        claimed: dict[str, float] = {}
        for stretch in stretches:
            for worker, count in stretch.claimed.items():
                claimed[worker] = claimed.get(worker, 0.0) + count
        kept = {
            worker: sum(stretch.delivered.get(worker, 0) for stretch in stretches) / count
            for worker, count in claimed.items()
            if count >= self._least
        }
        alone = 1.0 if any(stretch.has_waited for stretch in self._stretches) else 0.0
        best = sorted(kept.values(), reverse=True)[:2]
        found = {}
        for worker, share in kept.items():
            others = best[1:] if share == best[0] else best[:1]
            standard = min(1.0, *others) if others else alone
            if share * _FACTOR < standard:
                found[worker] = share / standard
        return found
