"""SIGTERM and SIGINT drain a process, within a limit; a second signal ends it at once.

Threads: Python runs signal handlers on the main thread, and only between two of its instructions, so not during a long native call. So the
interpreter also writes each signal into a pipe. A thread of this module reads it, and ends the process at the second signal or at the
limit, whatever the main thread does. If that thread cannot run (native code holds the interpreter's lock, or the teardown hangs), a timer
outside Python ends the process a moment later.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_CODE_BASE = 128
"""A process that a signal ended before the drain was complete exits with this plus the signal's number, as in shells."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Written into the pipe by the handler, because an event loop may have redirected the interpreter's own writes.
_HANDLED, _CLOSED = b"\xff", b"\xfe"
# Delay of the timer outside Python after the thread, which can also log.
_LAST_RESORT_S = 0.3


@contextmanager
def drain_on_signals(
    stop: Callable[[], None], *, limit_s: float | None = None, exit_now: Callable[[int], None] = os._exit
) -> Iterator[None]:
    """Inside the block the first signal calls `stop`, on a thread of this module; the second ends the process with code 128 + its number.

    With `limit_s` the process also ends when so many seconds have passed since the first signal, even after the block; the next process
    repeats the unfinished work, as after a kill. For the main thread only, where Python delivers signals. Restores the former handlers.
    """
    watch = _Watch(stop, limit_s, exit_now)
    received = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal received
        del frame
        received += 1
        watch.begin()
        watch.tell(_HANDLED + bytes([number]))
        if received > 1:
            watch.exit(number)

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    outer_pipe = signal.set_wakeup_fd(watch.write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        watch.close()


class _Watch:
    """Reads the pipe. `tell` may be called in a signal handler; `close` from the main thread.

    Its thread calls `stop`, which sets events and writes to the log. In a signal handler that could wait for ever for a lock that the
    interrupted thread holds.
    """

    def __init__(self, stop: Callable[[], None], limit_s: float | None, exit_now: Callable[[int], None]) -> None:
        self._stop = stop
        self._limit_s = limit_s
        self._exit_now = exit_now
        # Reentrant, because a signal handler may interrupt its holder.
        self._lock = threading.RLock()
        self._exited = False
        self._ends_s: float | None = None
        self._nowhere: int | None = None
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def tell(self, what: bytes) -> None:
        os.write(self.write_end, what)

    def begin(self) -> None:
        """The first signal has come: start the limit. The handler or the thread calls this."""
        with self._lock:
            if self._limit_s is None or self._ends_s is not None:
                return
            self._ends_s = time.monotonic() + self._limit_s
            # Discard its output, every thread's stack: the process ends as asked.
            self._nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(self._limit_s + _LAST_RESORT_S, exit=True, file=self._nowhere)

    def exit(self, number: int) -> None:
        """End the process, for a second signal or the limit."""
        with self._lock:
            if not self._exited:
                self._exited = True
                self._exit_now(EXIT_CODE_BASE + number)

    def close(self) -> None:
        """End the thread; the timer of a started limit goes on."""
        self.tell(_CLOSED)
        self._thread.join()
        os.close(self._read_end)
        os.close(self.write_end)

    def _run(self) -> None:
        """Each source reports every signal at most once, so two reports from one source are two signals."""
        by_handler = by_interpreter = 0
        ends_s: float | None = None
        is_draining = False
        while True:
            first = self._read(ends_s)
            if first is None:
                logger.warning("The drain did not end within %g s; what is not done is done again by the next process", self._limit_s)
                self.exit(signal.SIGTERM)
                ends_s = math.inf
                continue
            if first == _CLOSED[0]:
                return
            if first == _HANDLED[0]:
                by_handler += 1
                number = self._read(None) or signal.SIGTERM
            elif first in _SIGNALS:
                by_interpreter += 1
                number = first
            else:
                continue
            if max(by_handler, by_interpreter) > 1:
                self.exit(number)
            elif not is_draining:
                is_draining = True
                self.begin()
                ends_s = self._ends_s
                logger.info("%s: draining; once more to exit at once", signal.Signals(number).name)
                self._stop()

    def _read(self, until_s: float | None) -> int | None:
        """The next byte; None when the limit ends first."""
        timeout_s = None if until_s is None or until_s == math.inf else max(0.0, until_s - time.monotonic())
        readable, _, _ = select.select([self._read_end], [], [], timeout_s)
        return os.read(self._read_end, 1)[0] if readable else None
