"""Estimate of the requester's clock, by which deadlines are set and which may be far from this machine's.

Each request tells when it was issued, by the requester's clock, and arrives a little later. So the issue time of a request, moved forward
by our monotonic clock since its arrival, is never ahead of the requester's clock. The estimate is the latest of these over the newest few
requests; after as many it has also followed a step of either machine's clock.
"""

from __future__ import annotations

from collections import deque

from echo_bus.clock import Clock
from echo_schemas.records import Purpose, RolloutRequest

# Requests in the estimate: enough that one that lay in the log for long does not decide, and few enough that a step of a clock is
# followed before pace holds the feeder back.
_NUM_HEARD = 8


class AskersTime:
    """Estimates two clocks: the learner's, which asks for evaluations, and in asynchronous mode the feeder's, which asks for the rest."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Until a request has come, the clocks are taken to agree.
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
