"""The end of a reward application beside the run's own: an operator detaches it, or the run is over.

Threads: the view of `control` calls the listener of `end_when_detached` on its own thread; `RunEnd` runs on the application's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from echo_bus.clock import Clock
from echo_bus.reading.view import CompactedView
from echo_runtime.process import StopSignal
from echo_schemas.records import Control

logger = logging.getLogger(__name__)

RUN_OVER_S = 120.0
"""The run is presumed over after so long without a heartbeat of the learner, which comes every second, and without a scored batch."""
_LOOK_EVERY_S = 2.0


def end_when_detached(orders: CompactedView[Control], key: str, stop: StopSignal, born_ms: int) -> None:
    """Set `stop` when an order under `key` detaches the application. An order from before `born_ms`, when this process was started (Unix),
    was for an earlier process and is ignored; one that came while this process imported is not.
    """
    known = orders.get(key)
    epoch = -1 if known is None or known.time_ms >= born_ms else known.epoch

    def hear(changed: str, order: Control | None) -> None:
        if changed != key or order is None or order.attachment is None or order.epoch <= epoch:
            return
        if not order.attachment.is_attached and not stop.is_set():
            logger.info("Detached by %s", order.issued_by)
            stop.set()

    orders.on_change(hear)
    hear(key, orders.get(key))


class RunEnd:
    """Whether the run is over: neither `heard()` nor `scored()` has changed for `RUN_OVER_S`."""

    def __init__(self, heard: Callable[[], object], scored: Callable[[], object], clock: Clock) -> None:
        """`heard()` changes with every record of the learner, `scored()` with every batch."""
        self._heard = heard
        self._scored = scored
        self._clock = clock
        self._last: tuple[object, object] | None = None
        self._moved_s = clock.monotonic_s()

    def has_come(self) -> bool:
        """Compare now. Raises the errors of the two."""
        now_s, seen = self._clock.monotonic_s(), (self._heard(), self._scored())
        if seen != self._last:
            self._last, self._moved_s = seen, now_s
        return now_s - self._moved_s >= RUN_OVER_S

    async def watch(self, stop: StopSignal) -> None:
        """Compare every two seconds; set `stop` when the run is over."""
        while not self.has_come():
            await asyncio.sleep(_LOOK_EVERY_S)
        logger.info("The learner was silent for %g s and nothing was left to score: the run is over", RUN_OVER_S)
        stop.set()
