"""SIGTERM and SIGINT drain a process; a second signal ends it at once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def drain_on_signals(stop: Callable[[], None], *, exit_now: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Inside, the first signal calls `stop` (a loop's, a role's), the second ends the process with 128 + its number.

    For the main thread only: Python delivers signals there. The handlers that were in place come back afterwards.
    """
    received = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal received
        del frame
        received += 1
        if received > 1:
            exit_now(128 + number)
        logger.info("%s: draining; once more to exit at once", signal.Signals(number).name)
        stop()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
