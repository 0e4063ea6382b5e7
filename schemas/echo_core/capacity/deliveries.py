"""Whether workers deliver what they say they make: their heartbeats against what the learner has read of each. Pure.

heartbeat  ─▶ claimed:   rate · busy seconds since the heartbeat before
step report ─▶ delivered: what the learner read of the worker since the report before

A learner that does not wait may leave records in the log, so it reads little of everybody: a worker is measured by the best of the others.
Where there is no other, it is measured by its own claim, and only if the learner has waited.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from echo_schemas.records import WorkerShare, WorkerStatus

# So many reports together: what is on its way when one is written is small beside what came in five.
_REPORTS = 5
# A claim of fewer groups tells nothing: one group may come a report later.
_LEAST_GROUPS = 4
# Less than a third of what was said is no error of measurement: rates move by tens of per cent.
_FACTOR = 3.0
# Of workers by name: whoever may write `workers` may invent names.
_MOST_WORKERS = 10_000


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From one report to the next, in trajectories by worker."""

    claimed: Mapping[str, float]
    delivered: Mapping[str, int]
    has_waited: bool


class Deliveries:
    """What workers claim and what comes of it, over the last reports. Not thread-safe."""

    def __init__(self, *, group_size: int) -> None:
        self._least = _LEAST_GROUPS * group_size
        self._busy_s: dict[str, float] = {}
        self._claimed: dict[str, float] = {}
        self._stretches: deque[_Stretch] = deque(maxlen=_REPORTS)

    def heard(self, status: WorkerStatus) -> None:
        """A worker's newest word; not every one need be heard."""
        before_s = self._busy_s.pop(status.worker_id, None)
        self._busy_s[status.worker_id] = status.busy_s
        if len(self._busy_s) > _MOST_WORKERS:
            del self._busy_s[next(iter(self._busy_s))]
        if before_s is None:
            return
        # A process that was started anew counts from 0.
        busy_s = status.busy_s - before_s if status.busy_s >= before_s else status.busy_s
        claimed = status.rollouts_per_s * busy_s
        if claimed > 0 and math.isfinite(claimed):
            self._claimed[status.worker_id] = self._claimed.get(status.worker_id, 0.0) + claimed

    def reported(self, shares: Iterable[WorkerShare], *, has_waited: bool) -> None:
        """A step report, and whether the learner waited for its batch. One that says of nobody what was delivered is of an earlier release,
        and tells nothing.
        """
        claimed, self._claimed = self._claimed, {}
        delivered = {share.worker_id: share.delivered for share in shares}
        if any(delivered.values()):
            self._stretches.append(_Stretch(claimed, delivered, has_waited))

    def believed_shares(self) -> dict[str, float]:
        """Of the workers that deliver far less than they say: what part of their rate is to be believed.

        Five reports; a claims 1000 and delivers 950, b claims 1000 and delivers 100: {"b": 0.105}: 0.1, by the 0.95 that a delivers.
        """
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
