"""Progress of a long read, as lines in the log: how much is read, and how long the rest will take."""

from __future__ import annotations

import logging

from echo_bus.clock import Clock

logger = logging.getLogger(__name__)

# A shorter read logs nothing.
_SILENT_S = 2.0
_EVERY_S = 5.0


class ReadingNote:
    """Logs the progress after two seconds, and then every five. One thread uses it."""

    def __init__(self, what: str, num_records: int, clock: Clock) -> None:
        """`num_records`: how many offsets of the topics `what` are to be read."""
        self._what, self._all, self._clock = what, num_records, clock
        self._started_s = clock.monotonic_s()
        self._next_s = self._started_s + _SILENT_S
        self._said = False

    def left(self, num_records: int) -> None:
        """`num_records` are still to be read."""
        now_s = self._clock.monotonic_s()
        if now_s < self._next_s or not self._all:
            return
        self._next_s, self._said = now_s + _EVERY_S, True
        num_read = self._all - num_records
        rate = num_read / max(1e-3, now_s - self._started_s)
        rest = f"about {num_records / rate:.0f} s left" if rate else "nothing has come yet"
        logger.info("Reading %s: %s of %s (%.0f %%), %s", self._what, f"{num_read:,}", f"{self._all:,}", 100 * num_read / self._all, rest)

    def done(self) -> None:
        """All is read."""
        if self._said:
            logger.info("Read %s: %s records in %.1f s", self._what, f"{self._all:,}", self._clock.monotonic_s() - self._started_s)
