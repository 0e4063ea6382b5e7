"""The workers' costs since the last step, from their records on `workers`.

Threads: the view's thread adds; the learner's thread calls `take`.
"""

from __future__ import annotations

import threading

from echo_bus.clock import Clock
from echo_bus.reading.view import CompactedView
from echo_core.capacity.costs import CostMeter
from echo_schemas.records import KindCost, WorkerStatus


class HeardCosts:
    """A `CostMeter` that follows `workers` on this process's clock."""

    def __init__(self, workers: CompactedView[WorkerStatus], clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._meter = CostMeter()
        workers.on_change(self._hear)

    def take(self) -> tuple[KindCost, ...]:
        """Costs since the last call, by kind."""
        with self._lock:
            return self._meter.take()

    def _hear(self, _worker_id: str, status: WorkerStatus | None) -> None:
        if status is not None:
            with self._lock:
                self._meter.hear(status, self._clock.monotonic_s())
