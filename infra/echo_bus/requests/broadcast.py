"""T_bcast: seconds from a ready snapshot until enough workers have acknowledged it, on the measuring process's clock (ECHO-2 §4.1).

Enough is ⌈active / gamma⌉ of the workers that were alive when the snapshot became ready; workers on standby do not count. Threads: one
calls `ready`; a view's thread calls `on_worker`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from echo_bus.clock import Clock
from echo_bus.requests.roster import Roster
from echo_core.capacity.estimates import BroadcastWatch
from echo_core.capacity.overlap import GAMMA
from echo_schemas.records import WorkerState, WorkerStatus

_WORKING = (WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING)


class BroadcastTimer:
    """Measures T_bcast of the newest snapshot."""

    def __init__(self, roster: Roster, clock: Clock, on_measured: Callable[[float], object], *, gamma: float = GAMMA) -> None:
        """`on_measured` gets each T_bcast in seconds, on the view's thread."""
        self._roster = roster
        self._on_measured = on_measured
        self._clock = clock
        self._lock = threading.Lock()
        self._watch = BroadcastWatch(gamma=gamma)
        self._last_s: float | None = None

    @property
    def last_s(self) -> float | None:
        """T_bcast in seconds of the newest snapshot with enough acknowledgements; None before the first."""
        with self._lock:
            return self._last_s

    def ready(self, version: int) -> None:
        """The snapshot of `version` is about to be published."""
        active = sum(worker.state in _WORKING for worker in self._roster.living(self._clock.monotonic_s()))
        with self._lock:
            self._watch.ready(version, active, self._clock.monotonic_s())

    def on_worker(self, key: str, status: WorkerStatus | None) -> None:
        """A view's listener: a worker's status has changed."""
        if status is None or status.installed_version is None or status.state is WorkerState.STANDBY:
            return
        with self._lock:
            measured_s = self._watch.installed(key, status.installed_version, self._clock.monotonic_s())
            if measured_s is not None:
                self._last_s = measured_s
                self._on_measured(measured_s)
