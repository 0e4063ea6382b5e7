"""Notices about what stands still or keeps failing in a process, as sentences: in its log at once and then at intervals, and on /healthz.

Threads: any thread may call everything.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from echo_bus.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

STANDSTILL_S = 20.0
"""Seconds that a place may stand still without a notice."""
# One line a minute shows that the problem lasts.
_LOG_EVERY_S = 60.0
# A sentence that was not repeated for so long no longer holds.
_HOLDS_S = 60.0


@dataclass(slots=True)
class _Notice:
    sentence: str
    said_s: float
    logged_s: float


class Notices:
    """The newest sentence of each place. There are few places: names in the code, or rewards in the configuration."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._found: dict[str, _Notice] = {}

    def say(self, place: str, sentence: str) -> None:
        """`sentence` is true of `place` now. It is logged at once, then once a minute."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            known = self._found.get(place)
            is_due = known is None or now_s - known.logged_s >= _LOG_EVERY_S
            logged_s = now_s if known is None or is_due else known.logged_s
            self._found[place] = _Notice(sentence, now_s, logged_s)
        if is_due:
            logger.warning("%s", sentence)

    def clear(self, place: str) -> None:
        """The problem of `place` is over. If it returns, it is still logged once a minute at most."""
        with self._lock:
            if place in self._found:
                self._found[place].said_s = -math.inf

    def current(self) -> dict[str, str]:
        now_s = self._clock.monotonic_s()
        with self._lock:
            return {place: notice.sentence for place, notice in self._found.items() if now_s - notice.said_s < _HOLDS_S}


class Standstill:
    """A place that adds a notice when it has not moved for `STANDSTILL_S`. Used from one thread."""

    def __init__(self, notices: Notices, place: str, clock: Clock) -> None:
        self._notices = notices
        self._place = place
        self._clock = clock
        self._since_s = clock.monotonic_s()

    def moves(self) -> None:
        """The place has moved, or has nothing to do."""
        self._since_s = self._clock.monotonic_s()
        self._notices.clear(self._place)

    def stands(self, what: str, why: Callable[[], str]) -> None:
        """The place does not move: `what`, for example "No batch", has lasted since it last moved. `why()`: the cause and what to check."""
        waited_s = self._clock.monotonic_s() - self._since_s
        if waited_s >= STANDSTILL_S:
            self._notices.say(self._place, f"{what} for {waited_s:.0f} s. {why()}")
