"""The cost of workers: the one place where prices become money. Pure.

heartbeat, heartbeat ─▶ `spending` ─▶ one worker's money between the two
every heartbeat ─▶ `CostMeter` ─▶ the money of each kind, for a step report
step reports ─▶ `Bill` ─▶ a step, a thousand trained samples, the run

Times are of the clock of the process that reads the heartbeats. Money is in the currency of the prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo_schemas.records import KindCost, StepReport, WorkerState, WorkerStatus

SECONDS_PER_HOUR = 3600.0
_SILENT_S = 60.0
"""A longer silence costs nothing: the worker was gone. A shorter one may be a delay of the network."""
# Bounds memory: a writer of `workers` may invent names.
_MOST_WORKERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Money by use: `busy` with a group in the engine; `standby`; `idle`: all other time, the start included."""

    busy: float = 0.0
    idle: float = 0.0
    standby: float = 0.0

    def __add__(self, other: Spending) -> Spending:
        return Spending(busy=self.busy + other.busy, idle=self.idle + other.idle, standby=self.standby + other.standby)

    @property
    def total(self) -> float:
        return self.busy + self.idle + self.standby


NOTHING = Spending()


def price_of(hourly: float, seconds: float) -> float:
    """3.6 an hour for 10 s: 0.01."""
    return hourly * seconds / SECONDS_PER_HOUR


def spending(before: WorkerStatus, after: WorkerStatus, seconds: float) -> Spending:
    """The cost of one worker between two of its heartbeats, `seconds` apart, at the price and in the state of the first.

    3.6 an hour, ready, 10 s apart, `busy_s` 100 and 108: busy 0.008, idle 0.002.
    On standby instead, `busy_s` 100 and 100: standby 0.01. 100 s apart, or GONE before: nothing."""
    if not 0 < seconds <= _SILENT_S or before.state is WorkerState.GONE or not math.isfinite(before.price_per_hour):
        return NOTHING
    busy_s = min(seconds, max(0.0, grown(after.busy_s, before.busy_s)))
    busy, rest = price_of(before.price_per_hour, busy_s), price_of(before.price_per_hour, seconds - busy_s)
    return Spending(busy=busy, standby=rest) if before.state is WorkerState.STANDBY else Spending(busy=busy, idle=rest)


def grown(now: float, before: float) -> float:
    """How much a counter has grown. The counter of a restarted process counts from 0."""
    return now - before if now >= before else now


class CostMeter:
    """The money of all workers by kind, from one report to the next. Not thread-safe."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, WorkerStatus]] = {}
        self._spent: dict[str, Spending] = {}
        self._names: dict[str, set[str]] = {}

    def hear(self, status: WorkerStatus, now_s: float) -> None:
        """Count a worker's heartbeat, at `now_s` of a monotonic clock."""
        heard = self._heard.pop(status.worker_id, None)
        if heard is not None:
            then_s, before = heard
            cost = spending(before, status, now_s - then_s)
            if cost.total:
                self._spent[before.kind] = self._spent.get(before.kind, NOTHING) + cost
                self._names.setdefault(before.kind, set()).add(status.worker_id)
        # Removed and inserted again, so that the first entries are those silent for the longest.
        self._heard[status.worker_id] = now_s, status
        if len(self._heard) > _MOST_WORKERS:
            del self._heard[next(iter(self._heard))]

    def take(self) -> tuple[KindCost, ...]:
        """The money since the last call, by kind; empty if no worker has a price."""
        spent, names = self._spent, self._names
        self._spent, self._names = {}, {}
        return tuple(
            KindCost(kind=kind, num_workers=len(names[kind]), busy=cost.busy, idle=cost.idle, standby=cost.standby)
            for kind, cost in sorted(spent.items())
        )


@dataclass(slots=True)
class Bill:
    """The sum of step reports.

    Two reports, each of 8 samples, workers 0.03 (0.01 of it idle) and learner 0.01; the second again 0.04:
    total 0.08, per step 0.04, per thousand trained samples 5.0, idle 0.02."""

    kinds: dict[str, Spending] = field(default_factory=dict)
    learner: float = 0.0
    learner_s: float = 0.0
    num_steps: int = 0
    num_samples: int = 0
    first_step: float = 0.0

    def add(self, report: StepReport) -> None:
        for each in report.costs:
            spent = Spending(busy=each.busy, idle=each.idle, standby=each.standby)
            self.kinds[each.kind] = self.kinds.get(each.kind, NOTHING) + spent
        self.learner += report.learner_cost
        self.learner_s += report.idle_s + report.training_s
        self.num_samples += sum(report.staleness_total)
        self.num_steps += 1
        if self.num_steps == 1:
            self.first_step = self.total

    @property
    def workers(self) -> Spending:
        """All kinds together."""
        return sum(self.kinds.values(), NOTHING)

    @property
    def total(self) -> float:
        """Workers and learner."""
        return self.workers.total + self.learner

    @property
    def learner_per_hour(self) -> float:
        """The learner's price, as its steps were charged."""
        return self.learner * SECONDS_PER_HOUR / self.learner_s if self.learner_s > 0 else 0.0

    @property
    def per_step(self) -> float | None:
        """Mean of a step, and so of a version. The first step contains the start and is left out if there are others; None: no steps."""
        if self.num_steps > 1:
            return (self.total - self.first_step) / (self.num_steps - 1)
        return self.total if self.num_steps else None

    @property
    def per_1000(self) -> float | None:
        """Of a thousand trained samples, the start included; None if none were trained."""
        return 1000 * self.total / self.num_samples if self.num_samples else None


def sum_of(costs: Iterable[KindCost]) -> float:
    """All kinds and uses together."""
    return sum(each.busy + each.idle + each.standby for each in costs)
