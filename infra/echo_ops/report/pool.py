"""Each worker's work, cost and trajectories, from its heartbeats and the learner's step reports. Pure.

A worker's own counters start again when it is restarted under its name; the sums here go on. Times are seconds since the command was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from echo_core.capacity.costs import NOTHING, Spending, spending
from echo_schemas.records import WorkerShare, WorkerState, WorkerStatus

_WINDOW_S = 15.0
Count = TypeVar("Count", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLine:
    """One worker. Shares are between 0 and 1; None: not known yet.

    In the chosen period: `samples_per_s`: samples delivered per second; `share`: its part of all workers' samples; `idle_share`: the part
    of its time without a group in its engine. `staleness_*`: of its trained samples. `cost`: since its first heartbeat, with the parts
    `cost_idle` and `cost_standby`; `cost_per_1000`: per thousand trajectories delivered.
    """

    worker_id: str
    kind: str
    engine: str
    state: WorkerState
    version: int | None
    in_flight: int
    tokens_per_s: float
    heard_s: float
    delivered: int
    trained: int
    samples_per_s: float | None
    share: float | None
    idle_share: float | None
    staleness_mean: float | None
    staleness_max: int | None
    price_per_hour: float
    cost: float
    cost_idle: float
    cost_standby: float
    cost_per_1000: float | None


@dataclass(frozen=True, slots=True)
class _Reading:
    time_s: float
    delivered: int
    busy_s: float


@dataclass(slots=True)
class _Worker:
    """The heartbeats of one worker. Counters only grow: those of a restarted process are added to its predecessor's."""

    status: WorkerStatus
    heard_s: float
    delivered: int = 0
    busy_s: float = 0.0
    spent: Spending = NOTHING
    ready: _Reading | None = None
    recent: deque[_Reading] = field(default_factory=deque)

    def hear(self, status: WorkerStatus, time_s: float) -> None:
        self.spent += spending(self.status, status, time_s - self.heard_s)
        before, self.status, self.heard_s = self.status, status, time_s
        self.delivered += _grown(status.rollouts, before.rollouts)
        self.busy_s += _grown(status.busy_s, before.busy_s)
        reading = _Reading(time_s, self.delivered, self.busy_s)
        if self.ready is None and status.state is WorkerState.READY:
            self.ready = reading
        self.recent.append(reading)
        while len(self.recent) > 2 and self.recent[1].time_s <= time_s - _WINDOW_S:
            self.recent.popleft()


class PoolView:
    """All workers of a run. Not thread-safe."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._ages: dict[str, list[int]] = {}

    def hear(self, status: WorkerStatus, time_s: float) -> None:
        """Take a worker's heartbeat."""
        worker = self._workers.get(status.worker_id)
        if worker is None:
            # Work before its first heartbeat does not count.
            worker = self._workers[status.worker_id] = _Worker(status, time_s)
        worker.hear(status, time_s)

    def train(self, shares: Iterable[WorkerShare]) -> None:
        """Take the workers' shares of a trained step."""
        for share in shares:
            ages = self._ages.setdefault(share.worker_id, [])
            ages += [0] * (len(share.staleness) - len(ages))
            for age, count in enumerate(share.staleness):
                ages[age] += count

    def lines(self, *, recent: bool = False) -> list[WorkerLine]:
        """All workers by id, from their first weights on, or over the last seconds."""
        done = {name: self._period(worker, recent=recent) for name, worker in sorted(self._workers.items())}
        total = sum(samples for _, samples, _ in done.values())
        return [self._line(self._workers[name], period, total) for name, period in done.items()]

    def _period(self, worker: _Worker, *, recent: bool) -> tuple[float, int, float]:
        """Seconds, samples delivered and busy seconds in them."""
        if worker.ready is None:
            return 0.0, 0, 0.0
        since = worker.recent[0] if recent and worker.recent[0].time_s >= worker.ready.time_s else worker.ready
        return worker.heard_s - since.time_s, worker.delivered - since.delivered, worker.busy_s - since.busy_s

    def _line(self, worker: _Worker, period: tuple[float, int, float], total: int) -> WorkerLine:
        seconds, samples, busy_s = period
        status, ages = worker.status, self._ages.get(worker.status.worker_id, [])
        return WorkerLine(
            worker_id=status.worker_id,
            kind=status.kind,
            engine=status.engine,
            state=status.state,
            version=status.installed_version,
            in_flight=status.in_flight,
            tokens_per_s=status.tokens_per_s,
            heard_s=worker.heard_s,
            delivered=worker.delivered,
            trained=sum(ages),
            samples_per_s=samples / seconds if seconds > 0 else None,
            share=samples / total if total else None,
            idle_share=min(1.0, max(0.0, 1.0 - busy_s / seconds)) if seconds > 0 else None,
            staleness_mean=mean_age(ages),
            staleness_max=max((age for age, count in enumerate(ages) if count), default=None),
            price_per_hour=status.price_per_hour,
            cost=worker.spent.total,
            cost_idle=worker.spent.idle,
            cost_standby=worker.spent.standby,
            cost_per_1000=1000 * worker.spent.total / worker.delivered if worker.delivered else None,
        )


def mean_age(histogram: Sequence[int]) -> float | None:
    """Mean of a histogram whose entry i counts samples of staleness i; None for an empty one."""
    total = sum(histogram)
    return sum(age * count for age, count in enumerate(histogram)) / total if total else None


def cost_per_1000(lines: Sequence[WorkerLine]) -> float | None:
    """The cost per thousand trajectories of all workers together; None if none was delivered."""
    delivered = sum(line.delivered for line in lines)
    return 1000 * sum(line.cost for line in lines) / delivered if delivered else None


def _grown(now: Count, before: Count) -> Count:
    return now - before if now >= before else now
