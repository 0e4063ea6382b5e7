"""Time as a dependency: the system's clock, one that tests move by hand, and deadlines on either."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

MAX_CLOCK_ERROR_MS = 2 * 60 * 60 * 1000
"""Allowed difference between two clocks when a time decides where reading a log starts: twice the error that the chaos suite tests."""


class Clock(Protocol):
    """Monotonic time for durations, wall time for records."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""

    def time_ms(self) -> int:
        """Milliseconds since the epoch."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that stands still until `advance` is called. Thread-safe."""

    def __init__(self, *, start_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._elapsed_s = 0.0
        self._start_ms = start_ms

    def monotonic_s(self) -> float:
        with self._lock:
            return self._elapsed_s

    def time_ms(self) -> int:
        with self._lock:
            return self._start_ms + int(self._elapsed_s * 1000)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._elapsed_s += seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on a clock's monotonic time."""

    clock: Clock
    at_s: float

    @classmethod
    def after(cls, seconds: float, clock: Clock | None = None) -> Deadline:
        """`seconds` from now."""
        clock = clock or SystemClock()
        return cls(clock, clock.monotonic_s() + seconds)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.clock.monotonic_s())

    def expired(self) -> bool:
        return self.remaining_s() == 0.0
