"""Estimates for decisions on the pool: T_train, T_bcast, workers' rates, live workers. Pure: the caller passes the time.

Used by the roles of a live run and by the simulation.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from echo_core.capacity.overlap import GAMMA

# T_train and T_bcast are medians of so many (ECHO-2 §4.3): a single snapshot may be late because its receiver died.
_MEDIAN_OF = 5
# Speed is the mean over so many seconds of work: long enough to be steady, short enough to follow a machine that slows down.
_SPEED_WINDOW_S = 20.0
# A worker without a heartbeat for so many intervals, and at least so many seconds, is presumed dead: requests to it would wait until the
# consumer group notices.
_MISSED_WORDS = 5
_LEAST_PATIENCE_S = 5.0


def heartbeat_patience_s(heartbeat_s: float) -> float:
    """Seconds of silence after which a worker is presumed dead: five heartbeats, and five seconds at least."""
    return max(_LEAST_PATIENCE_S, _MISSED_WORDS * heartbeat_s)


class RecentMedian:
    """The median of the newest five measurements. One thread may add while another reads."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=_MEDIAN_OF)

    def add(self, measured: float) -> None:
        self._measured.append(measured)

    @property
    def value(self) -> float | None:
        """None before the first."""
        measured = tuple(self._measured)
        return statistics.median(measured) if measured else None


class BroadcastWatch:
    """T_bcast: from a snapshot's publication until ⌈active / gamma⌉ workers have installed it (ECHO-2 §4.1). Not thread-safe.

    Three active workers, gamma = 1.1: ⌈2.73⌉ = 3; published at 10 s, installed at 12, 13 and 17 s: T_bcast = 7 s."""

    def __init__(self, *, gamma: float = GAMMA) -> None:
        self._gamma = gamma
        self._version: int | None = None
        self._ready_s = 0.0
        self._needed = 0
        self._acknowledged: set[str] = set()

    def ready(self, version: int, num_active: int, now_s: float) -> None:
        """The snapshot of `version` is published for `num_active` workers; from now on it is watched instead of an older one."""
        self._version, self._ready_s, self._needed = version, now_s, max(1, math.ceil(num_active / self._gamma))
        self._acknowledged.clear()

    def installed(self, worker_id: str, version: int, now_s: float) -> float | None:
        """A worker has installed `version`. T_bcast in seconds if this was the last worker needed, else None."""
        if self._version is None or version < self._version or len(self._acknowledged) == self._needed:
            # Keep no more names than needed: workers may invent them.
            return None
        self._acknowledged.add(worker_id)
        return now_s - self._ready_s if len(self._acknowledged) == self._needed else None


class KnownRates:
    """The newest rate of each worker with heartbeats; a restarted worker keeps its former rate until it reports a new one."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def update(self, reported: Mapping[str, float]) -> Mapping[str, float]:
        """Rates in rollouts/s of all workers in `reported`, their newest reports; 0 for an unknown rate. Reports that are no positive
        number are ignored."""
        told = {worker_id: rate if math.isfinite(rate) and rate > 0 else 0.0 for worker_id, rate in reported.items()}
        self._rates = {worker_id: rate or self._rates.get(worker_id, 0.0) for worker_id, rate in told.items()}
        return self._rates


class Speed:
    """Samples and tokens per second of work, forgetting exponentially over 20 busy seconds. Not thread-safe. Busy time counts once it has
    given samples: if groups take longer than the window, the last ones determine the speed. If none come for longer than that, the speed
    falls steadily."""

    def __init__(self) -> None:
        self._busy_s = self._samples = self._tokens = 0.0
        self._pending_s = 0.0

    def add(self, *, busy_s: float, samples: int, tokens: int) -> None:
        """Add the samples and tokens of `busy_s` seconds of work."""
        self._pending_s += busy_s
        if not samples:
            return
        kept = max(0.0, 1.0 - self._pending_s / _SPEED_WINDOW_S)
        self._busy_s = self._busy_s * kept + self._pending_s
        self._samples = self._samples * kept + samples
        self._tokens = self._tokens * kept + tokens
        self._pending_s = 0.0

    @property
    def samples_per_s(self) -> float:
        """0 before any work."""
        return self._samples / self._over_s if self._over_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 before any work."""
        return self._tokens / self._over_s if self._over_s > 0 else 0.0

    @property
    def _over_s(self) -> float:
        return max(self._busy_s, self._pending_s)
