"""Limits on dead letters: how many unreadable messages of a reader are copied whole and logged one by one.

A reader goes on, however many messages it cannot read. Above the limits a copy holds the message's position and the error only, and the log
gives their number.

Threads: a budget belongs to the one thread that judges messages.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass

from echo_bus.client.cluster import RawMessage
from echo_bus.clock import Clock
from echo_bus.errors import TooManyDeadLetters
from echo_bus.message import raw_headers
from echo_bus.metrics import BusMetrics
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.headers import SOURCE, group_of

logger = logging.getLogger(__name__)

_MINUTE_S = 60.0
# A writer chooses its own name and may change it each time, so writers above this number in a minute share one count.
_MOST_WRITERS = 64
_MOST_NAME_LENGTH = 100
_OTHERS = "other writers"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterLimits:
    """How many unreadable messages one reader copies whole and logs one by one; see [dead_letters].

    `per_writer` and `per_minute`: most in a minute, from one writer (as `ce_source` names it) and from all writers. `stop_after`: so many
    in a row end the reader; 0: never.
    """

    per_writer: int = 60
    per_minute: int = 600
    stop_after: int = 0

    def __post_init__(self) -> None:
        if min(self.per_writer, self.per_minute, self.stop_after) < 0:
            raise UserError(f"These limits on dead letters make no sense: {self}.", hint="None of them is negative.")


class DeadLetterBudget:
    """Counts the unreadable messages of one reader against the limits, in constant memory, in the log and in the metrics."""

    def __init__(self, limits: DeadLetterLimits, clock: Clock, metrics: BusMetrics | None = None) -> None:
        self._limits, self._clock, self._metrics = limits, clock, metrics or BusMetrics()
        self._in_a_row = 0
        self._ends_s = -math.inf
        self._num_whole = 0
        self._seen: Counter[str] = Counter()
        self._over: Counter[str] = Counter()

    def count_valid(self, num_messages: int = 1) -> None:
        """`num_messages` were readable. Called per batch."""
        if num_messages > 0:
            self._in_a_row = 0
        if self._over:
            self._begin_minute()

    def count_invalid(self, raw: RawMessage, invalid: InvalidRecord) -> bool:
        """One message was not readable. Returns whether it is within the limits, so that its copy may be whole.

        Raises TooManyDeadLetters after `stop_after` in a row; the caller must then not dead-letter the message.
        """
        self._metrics.records_invalid.labels(raw.topic(), invalid.reason.value).inc()
        self._in_a_row += 1
        if 0 < self._limits.stop_after < self._in_a_row:
            raise TooManyDeadLetters(
                f"{self._in_a_row} messages in a row were invalid ([dead_letters] stop_after = {self._limits.stop_after}); the last one "
                f"because: {invalid.message}",
                hint="Compare the writer's schemas and namespace with ours, mend it and start again: nothing was skipped. Or step over "
                "them: start once with ECHO_DEAD_LETTERS__STOP_AFTER=0.",
            )
        self._begin_minute()
        writer = _writer_of(raw)
        if writer not in self._seen and len(self._seen) >= _MOST_WRITERS:
            writer = _OTHERS
        self._seen[writer] += 1
        if self._seen[writer] <= self._limits.per_writer and self._num_whole < self._limits.per_minute:
            self._num_whole += 1
            where = (raw.topic(), raw.partition(), raw.offset())
            about = {} if (group := group_of(raw_headers(raw))) is None else {"group": group}
            logger.warning("%s[%s]@%s is invalid (%s): %s", *where, invalid.reason, invalid.message, extra=about)
            return True
        self._metrics.records_over_budget.labels(raw.topic()).inc()
        self._over[writer] += 1
        if self._over[writer] == 1:
            logger.error(
                "%s writes what cannot be read to %s, %d messages within a minute; reading goes on, and what follows is counted only. "
                "The last, [%s]@%s, is invalid (%s): %s",
                *(writer, raw.topic(), self._seen[writer], raw.partition(), raw.offset(), invalid.reason, invalid.message),
            )
        return False

    def _begin_minute(self) -> None:
        """If the minute is over, log the number above the limits and start a new count."""
        now_s = self._clock.monotonic_s()
        if now_s < self._ends_s:
            return
        for writer, number in self._over.items():
            logger.error("%d further messages of %s could not be read within a minute", number, writer)
        self._ends_s = now_s + _MINUTE_S
        self._num_whole = 0
        self._seen.clear()
        self._over.clear()


def _writer_of(raw: RawMessage) -> str:
    """The writer's name, as the message gives it."""
    for name, value in raw_headers(raw):
        if name == SOURCE and value:
            return value[:_MOST_NAME_LENGTH].decode(errors="replace")
    return "An unnamed writer"
