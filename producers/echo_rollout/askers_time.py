"""Estimate of the requester's clock: deadlines are moments of the asker's clock, and this machine's may be far from it.

Each request says when it was issued, by the requester's clock, and arrives a little later. The estimate of the newest few requests, each
moved forward by our monotonic clock since it arrived, is therefore never ahead; the latest of them is taken. After a few requests the
estimate has also followed a step of either machine's clock.
"""

from __future__ import annotations

from collections import deque

from echo_bus.clock import Clock
from echo_schemas.records import Purpose, RolloutRequest

# Enough that one that lay in the log for long does not set the time, and few enough that a clock is believed before the pace of the run
# has nothing left to issue.
_NUM_HEARD = 8


class AskersTime:
    """Listens to requests. Evaluations are asked for by the learner, the rest, in asynchronous mode, by the feeder: each has a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Until something is heard, our clocks agree.
        agreed_ms = clock.time_ms() - self._monotonic_ms()
        self._ahead_ms = {is_eval: deque([agreed_ms], maxlen=_NUM_HEARD) for is_eval in (False, True)}

    def heard(self, request: RolloutRequest) -> None:
        """`request` has just come."""
        self._ahead_ms[request.purpose is Purpose.EVAL].append(request.issued_ms - self._monotonic_ms())

    def left_s(self, request: RolloutRequest) -> float | None:
        """Seconds until the deadline of `request`, negative after it; None if it has none."""
        if request.deadline_ms is None:
            return None
        now_ms = self._monotonic_ms() + max(self._ahead_ms[request.purpose is Purpose.EVAL])
        return (request.deadline_ms - now_ms) / 1000

    def _monotonic_ms(self) -> int:
        return round(self._clock.monotonic_s() * 1000)
