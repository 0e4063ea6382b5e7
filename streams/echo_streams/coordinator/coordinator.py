"""The coordinator: reads the learner's and workers' records, and writes orders to workers on `control`.

    steps, weights, workers ──▶ estimates on this clock ──every_s──▶ `PoolRule` ──▶ one transaction of orders

A run has one coordinator: orders are written under the transactional id `coordinator`. A coordinator that starts takes the id over before
it reads `control`, so it knows every order of its predecessor, which can write none after that. Each transaction of orders has an epoch
above the highest in the log. All state is in the log: a restart reads the newest steps and orders, and measures T_bcast at the next
publication.

Threads: `run` blocks its caller; each view calls its listener on its own thread.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Clock
from echo_bus.errors import ProducerFenced, TransactionAborted
from echo_bus.reading.reader import LogReader
from echo_bus.reading.view import CompactedView
from echo_bus.requests.broadcast import BroadcastTimer
from echo_bus.requests.roster import Roster
from echo_core.capacity.activation import Candidate, total_price
from echo_core.capacity.decision import PoolLook, PoolRule, PoolWorker, Sizing, figures_of, missing_prices
from echo_core.capacity.deliveries import Deliveries
from echo_core.capacity.estimates import KnownRates, RecentMedian
from echo_core.capacity.sizing import SizingPolicy
from echo_core.policy import StalenessPolicy
from echo_runtime.notices import Notices
from echo_runtime.process import StopSignal
from echo_schemas.errors import UserError
from echo_schemas.records import Control, StepReport, WeightManifest, WorkerControl, WorkerStatus
from echo_schemas.topics import CONTROL
from echo_settings import Settings
from echo_streams.coordinator.machines import machines_of
from echo_streams.metrics import CoordinatorMetrics

logger = logging.getLogger(__name__)

# Records of `steps` that are read at the start: enough for five reports.
_TAIL = 64
_READ_S = 0.5
# Idle share of a step from which on the learner counts as waiting.
_WAITS = 0.1
_NOBODY = (
    "No worker is heard any more, so nothing is generated. Start one (`echoswarm run worker`), and look at the logs of those that ended: "
    "requests wait in Kafka, and nothing is lost."
)


@dataclass(kw_only=True, eq=False)
class Coordinator:
    """Sizes one run's pool until `stop`. Used from one thread.

    The caller opens and closes what it works with. `writer` was started before `control` was opened; `steps` is not started. The views
    follow the log.
    """

    settings: Settings
    policy: StalenessPolicy
    bus: Bus
    writer: TransactionalWriter
    steps: LogReader
    weights: CompactedView[WeightManifest]
    workers: CompactedView[WorkerStatus]
    control: CompactedView[Control]
    notices: Notices
    metrics: CoordinatorMetrics
    clock: Clock

    def __post_init__(self) -> None:
        settings, clock = self.settings, self.clock
        self._run_id = settings.run.name
        self._rule = PoolRule(self.policy, SizingPolicy(margin=settings.coordinator.hysteresis), gamma=settings.coordinator.gamma)
        self._training_s, self._broadcast_s = RecentMedian(), RecentMedian()
        self._roster = Roster(heartbeat_s=settings.rollout.heartbeat_s, group_size=settings.rollout.group_size)
        self._roster.follow(self.workers, clock)
        self._broadcast = BroadcastTimer(self._roster, clock, self._broadcast_s.add, gamma=settings.coordinator.gamma)
        self.workers.on_change(self._broadcast.on_worker)
        self._deliveries = Deliveries(group_size=settings.rollout.group_size)
        self.weights.on_change(self._on_weights)
        self._rates = KnownRates()
        self._has_heard = False
        self._machines = machines_of(settings)
        # This coordinator's newest orders, by worker: the view may not have read them yet.
        self._ordered: dict[str, Control] = {}
        self._epoch = max((order.epoch for order in self._orders().values()), default=0)

    def run(self, stop: StopSignal) -> None:
        """Decide every `every_s` until `stop`; then call all workers back, since no coordinator is left to do it.

        Raises UserError when another coordinator has taken over; TransportError.
        """
        woken = threading.Event()
        stop.on_set(woken.set)
        self.begin()
        logger.info("Sizing the pool of %s from epoch %d on", self._run_id, self._epoch)
        due_s = self.clock.monotonic_s()
        while not stop.is_set():
            self.hear_steps(max(0.0, min(_READ_S, due_s - self.clock.monotonic_s())))
            if self.clock.monotonic_s() >= due_s:
                self.look()
                due_s += self.settings.coordinator.every_s
        self.call_back()

    def begin(self) -> None:
        """Read the newest steps. Raises as `LogReader.start`."""
        bounds = self.steps.bounds()
        self.steps.start({place: max(low, high - _TAIL) for place, (low, high) in bounds.items()})

    def hear_steps(self, timeout_s: float) -> None:
        """Take the learner's new reports, waiting at most `timeout_s`."""
        for message in self.steps.read(timeout_s=timeout_s):
            report = message.record
            if isinstance(report, StepReport):
                for status in self._roster.living(self.clock.monotonic_s()):
                    self._deliveries.heard(status)
                self._deliveries.reported(report.workers, has_waited=report.idle_s > _WAITS * (report.idle_s + report.training_s))
                if report.training_s > 0:
                    self._training_s.add(report.training_s)

    def look(self) -> Sizing:
        """One decision, and its orders. Raises UserError if another coordinator has taken over."""
        self._refuse_successor()
        look = self._pool()
        sizing = self._rule.decide(look)
        if sizing.orders:
            self._write(sizing.orders, sizing.reason, figures_of(look, sizing))
        self._say("capacity", f"The pool is too small, so every worker takes part. {sizing.advice}" if sizing.advice else "")
        self._say("prices", missing_prices(look.workers))
        self._measure(look, sizing)
        return sizing

    def _say(self, place: str, sentence: str) -> None:
        if sentence:
            self.notices.say(place, sentence)
        else:
            self.notices.clear(place)

    def call_back(self) -> None:
        """Order every worker on standby to take part."""
        standing_by = [name for name, order in self._orders().items() if order.worker is not None and not order.worker.active]
        if standing_by and self._machines.calls_back:
            self._write(dict.fromkeys(standing_by, True), "the coordinator ends, so every worker takes part", {})

    def _refuse_successor(self) -> None:
        """Raise UserError if another coordinator has written orders, with a higher epoch: the cluster would tell only at the next write."""
        if any(order.epoch > self._epoch and order.issued_by == self.bus.client_id for order in self._orders().values()):
            raise self._taken_over()

    def _taken_over(self, doubt: str = "") -> UserError:
        return UserError(
            f"Another coordinator has taken over run {self._run_id!r}{doubt}; this one ends.",
            hint="Run one coordinator per run. If no other runs, start this one again: it goes on where the log ends.",
        )

    def _pool(self) -> PoolLook:
        heard = self._roster.living(self.clock.monotonic_s())
        self._has_heard = self._has_heard or bool(heard)
        self._say("pool", _NOBODY if self._has_heard and not heard else "")
        offers = self._machines.offers(heard, self.workers.items(), self._orders(), self.clock.time_ms())
        told = self._rates.update({each.status.worker_id: each.status.rollouts_per_s for each in offers})
        found = {name: share for name, share in self._deliveries.believed_shares().items() if name in told}
        self.metrics.disbelieved.set(len(found))
        sentences = (
            f"{name} says {told[name]:.4g} rollouts/s and delivers {told[name] * share:.4g}, so it counts with what it delivers."
            for name, share in found.items()
        )
        self._say("claims", " ".join(sentences))
        rates = {name: rate * found.get(name, 1.0) for name, rate in told.items()}
        return PoolLook(
            train_s=self._training_s.value,
            broadcast_s=self._broadcast_s.value,
            workers=[
                PoolWorker(candidate=_candidate(each.status, rates[each.status.worker_id]), is_active=each.is_active) for each in offers
            ],
        )

    def _orders(self) -> dict[str, Control]:
        """The newest order to each worker, by this or another coordinator."""
        found = {str(order.worker_id): order for order in self.control.items().values() if order.worker is not None}
        return found | {name: order for name, order in self._ordered.items() if name not in found or found[name].epoch < order.epoch}

    def _write(self, orders: Mapping[str, bool], reason: str, figures: Mapping[str, float]) -> None:
        """Write all of `orders` under one epoch, or none of them. Raises UserError if another coordinator has taken over."""
        now_ms = self.clock.time_ms()
        epoch = 1 + max([self._epoch, *(order.epoch for order in self._orders().values())])
        made = {
            worker_id: Control(
                run_id=self._run_id,
                epoch=epoch,
                worker_id=worker_id,
                worker=WorkerControl(active=active, reason=reason, figures=figures),
                issued_by=self.bus.client_id,
                time_ms=now_ms,
            )
            for worker_id, active in orders.items()
        }
        try:
            with self.writer.transaction() as transaction:
                for order in made.values():
                    transaction.publish(CONTROL, order)
        except ProducerFenced as exc:
            raise self._taken_over(" (or a transaction of this one timed out)") from exc
        except TransactionAborted as exc:
            logger.warning("The cluster rolled these orders back; the next decision replaces them: %s", exc)
            self.metrics.aborted.inc()
            return
        # Replaces the orders of the transaction before, which the view has read by now.
        self._epoch, self._ordered = epoch, made
        for active in orders.values():
            self.metrics.orders.labels("activate" if active else "release").inc()
        logger.info("Epoch %d: %s", epoch, reason)

    def _measure(self, look: PoolLook, sizing: Sizing) -> None:
        metrics = self.metrics
        active, standby = sizing.split(look.workers)
        for state, workers in (("active", active), ("standby", standby)):
            metrics.workers.labels(state).set(len(workers))
            metrics.price.labels(state).set(total_price(each.candidate for each in workers))
        wanted = Counter(each.candidate.kind for each in active)
        for kind in {each.candidate.kind for each in look.workers}:
            metrics.wanted.labels(metrics.kind_label.of(kind)).set(wanted[kind])
        metrics.rate.set(sizing.rate)
        figures = {
            metrics.train_seconds: look.train_s,
            metrics.broadcast_seconds: look.broadcast_s,
            metrics.min_rate: sizing.min_rate,
            metrics.target_rate: sizing.target,
            metrics.bound: sizing.bound,
            metrics.feasible: sizing.is_feasible,
        }
        for gauge, figure in figures.items():
            if figure is not None:
                gauge.set(figure)

    def _on_weights(self, _key: str, manifest: WeightManifest | None) -> None:
        if manifest is not None:
            self._broadcast.ready(manifest.version)


def _candidate(status: WorkerStatus, rate: float) -> Candidate:
    price = status.price_per_hour
    return Candidate(
        worker_id=status.worker_id,
        kind=status.kind,
        rate=rate,
        # A worker may report any value; NaN and infinity count as no price.
        price_per_hour=max(0.0, price) if math.isfinite(price) else 0.0,
    )
