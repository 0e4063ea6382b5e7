"""Finished groups that the log has not acknowledged: how many, for how long, and whether that is a reason to take no more work.

A worker that cannot reach Kafka keeps what it has finished, and the client goes on trying for as long as it takes. What it keeps is bounded
by the groups that it takes in hand. Threads: any.
"""

from __future__ import annotations

import threading

from echo_bus.clock import Clock
from echo_rollout.metrics import WorkerMetrics
from echo_runtime.notices import Notices

STUCK_S = 5.0
"""A fail-over of brokers is over by then; a group that waits for longer waits for somebody to do something."""

_PLACE = "undelivered"


class Undelivered:
    """Tells whether finished groups get out. `look` now and then, so that it is said."""

    def __init__(self, metrics: WorkerMetrics, notices: Notices, clock: Clock) -> None:
        self._notices = notices
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s: dict[int, float] = {}
        metrics.undelivered.set_function(lambda: len(self._since_s))
        metrics.undelivered_seconds.set_function(lambda: self.oldest_s)

    def add(self, group: object) -> None:
        """`group` is finished and on its way."""
        with self._lock:
            self._since_s[id(group)] = self._clock.monotonic_s()

    def remove(self, group: object) -> None:
        """The log has it, or never will."""
        with self._lock:
            self._since_s.pop(id(group), None)

    @property
    def oldest_s(self) -> float:
        """For how long the oldest has waited; 0 without any."""
        with self._lock:
            # In the order in which they came.
            since_s = next(iter(self._since_s.values()), None)
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    @property
    def is_stuck(self) -> bool:
        """Whether no more work should be asked for."""
        return self.oldest_s > STUCK_S

    def problem(self) -> str | None:
        """The same as a sentence; None if all is well."""
        oldest_s = self.oldest_s
        if oldest_s <= STUCK_S:
            return None
        return f"{len(self._since_s)} finished groups wait for Kafka, the oldest for {oldest_s:.0f} s; no more requests are taken."

    def look(self) -> None:
        """Tell it, if it is so."""
        problem = self.problem()
        if problem is None:
            self._notices.clear(_PLACE)
        else:
            self._notices.say(_PLACE, f"{problem} They are kept, and delivered when it answers.")
