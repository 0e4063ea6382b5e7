"""Finished groups that the log has not acknowledged: how many, for how long, and whether the worker should take no more requests.

A worker that cannot reach Kafka keeps its finished groups, and the client tries without end. It keeps at most as many as it takes in hand.
Threads: any.
"""

from __future__ import annotations

import threading

from echo_bus.clock import Clock
from echo_rollout.metrics import WorkerMetrics
from echo_runtime.notices import Notices

STUCK_S = 5.0
"""Seconds. A fail-over of brokers takes less; after a longer wait an operator has to act."""

_PLACE = "undelivered"


class Undelivered:
    """Finished groups on their way to Kafka. Call `look` regularly to report a standstill."""

    def __init__(self, metrics: WorkerMetrics, notices: Notices, clock: Clock) -> None:
        self._notices = notices
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s: dict[int, float] = {}
        metrics.undelivered.set_function(lambda: len(self._since_s))
        metrics.undelivered_seconds.set_function(lambda: self.oldest_s)

    def add(self, group: object) -> None:
        """`group` is finished and is being published."""
        with self._lock:
            self._since_s[id(group)] = self._clock.monotonic_s()

    def remove(self, group: object) -> None:
        """`group` is in the log, or was given up."""
        with self._lock:
            self._since_s.pop(id(group), None)

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest group has waited; 0 without any."""
        with self._lock:
            # A dict keeps the order in which groups came.
            since_s = next(iter(self._since_s.values()), None)
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    @property
    def is_stuck(self) -> bool:
        """Whether no more requests should be taken."""
        return self.oldest_s > STUCK_S

    def problem(self) -> str | None:
        """`is_stuck` as a sentence; None if it is not."""
        oldest_s = self.oldest_s
        if oldest_s <= STUCK_S:
            return None
        return f"{len(self._since_s)} finished groups wait for Kafka, the oldest for {oldest_s:.0f} s; no more requests are taken."

    def look(self) -> None:
        """Set or clear the notice."""
        problem = self.problem()
        if problem is None:
            self._notices.clear(_PLACE)
        else:
            self._notices.say(_PLACE, f"{problem} They are kept, and delivered when it answers.")
