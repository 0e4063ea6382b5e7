"""Watches whether an event loop runs, and names the code that blocks it while it does so.

    the loop ─ beats every quarter of a second ─▶ the watch's thread ─▶ late: at which line is the loop's thread?

Threads: `start` and `close` belong to the watched loop; the watch's own thread calls `look`; the health request's thread calls `check`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType

from echo_bus.clock import Clock
from echo_runtime.notices import STANDSTILL_S, Notices

_EVERY_S = 0.25
# Longer than any proper computation on an event loop.
_LATE_S = 1.0
_MEANWHILE_EVERY_S = 5.0

PLACE = "event loop"
Name = Callable[[FrameType], "str | None"]
"""The name of a frame of the loop's thread, if the user knows one."""


class LoopWatch:
    """Watches one event loop. `start` it on the loop, and `close` it."""

    def __init__(
        self, notices: Notices, clock: Clock, *, name: Name = lambda frame: None, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """`meanwhile`: called every five seconds while the loop is late, on the watch's thread."""
        self._notices = notices
        self._clock = clock
        self._name = name
        self._meanwhile = meanwhile
        self._next_s = clock.monotonic_s() + _MEANWHILE_EVERY_S
        self._beat_s = clock.monotonic_s()
        self._thread_id = 0
        self._stop = threading.Event()
        self._beats: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._look_on, name="event loop watch", daemon=True)

    def start(self) -> None:
        self._thread_id = threading.get_ident()
        self._beat_s = self._clock.monotonic_s()
        self._beats = asyncio.create_task(self._beat(), name="beat")
        self._thread.start()

    def close(self) -> None:
        """Stop watching. On the loop."""
        self._stop.set()
        if self._beats is not None:
            self._beats.cancel()

    def check(self) -> str | None:
        """A health check: a loop that has been blocked for twenty seconds will not recover."""
        late_s = self._clock.monotonic_s() - self._beat_s
        return None if late_s < STANDSTILL_S else self._sentence(late_s)

    def look(self) -> None:
        """Add a notice if the loop is late now."""
        now_s = self._clock.monotonic_s()
        late_s = now_s - self._beat_s
        if late_s >= _LATE_S:
            self._notices.say(PLACE, self._sentence(late_s))
            if now_s >= self._next_s:
                self._next_s = now_s + _MEANWHILE_EVERY_S
                self._meanwhile()

    async def _beat(self) -> None:
        while True:
            self._beat_s = self._clock.monotonic_s()
            await asyncio.sleep(_EVERY_S)

    def _look_on(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self.look()

    def _sentence(self, late_s: float) -> str:
        return f"The event loop has been held up for {late_s:.0f} s by {self._culprit()}: nothing else goes on in this process meanwhile."

    def _culprit(self) -> str:
        """The innermost frame that has a name, else the innermost one."""
        innermost = frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001  the only way to see another thread's stack
        while frame is not None:
            if name := self._name(frame):
                return name
            frame = frame.f_back
        return "an unknown place" if innermost is None else place_of(innermost)


def place_of(frame: FrameType) -> str:
    """`function (file:line)`."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
