"""Which steps are in the log, and when each was seen there; it reads around the proxies.

Threads: one of its own reads `steps`; the methods may be called from any other.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing
from types import TracebackType
from typing import Self

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.errors import TransportError
from echo_bus.reading.reader import From
from echo_schemas.records import StepReport
from echo_schemas.topics import STEPS

_READ_S = 0.1
_LOOK_S = 0.02


class Follower:
    """The run's newest committed version, and the gaps between steps."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: list[tuple[int, float]] = []
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def version(self) -> int:
        """The newest version in the log; 0 before the first step."""
        if self._failure is not None:
            message = "the follower of `steps` has failed"
            raise AssertionError(message) from self._failure
        return self._seen[-1][0] if self._seen else 0

    def seen_s(self, version: int) -> float:
        """When a step to at least `version` was first seen, on the monotonic clock."""
        return next(when for found, when in self._seen if found >= version)

    def longest_gap_s(self, since_s: float, version: int) -> float:
        """The longest time without a step, from `since_s` on to the step to `version`."""
        times = [since_s, *(when for found, when in self._seen if when > since_s and found <= version)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def wait_for(self, version: int, deadline: Deadline) -> bool:
        """Wait for a step to `version`, a moment at a time for whoever watches something else as well; False if it is not there yet."""
        pause = Deadline.after(min(0.5, max(0.0, deadline.remaining_s())))
        while self.version < version:
            if pause.expired():
                return False
            self._stop.wait(_LOOK_S)
        return True

    def _follow(self) -> None:
        position: int | None = None
        while not self._stop.is_set():
            try:
                with closing(self._bus.reader([STEPS])) as reader:
                    reader.start({} if position is None else {(STEPS.name, 0): position}, otherwise=From.BEGINNING)
                    while not self._stop.is_set():
                        for message in reader.read(timeout_s=_READ_S):
                            if isinstance(message.record, StepReport):
                                self._seen.append((message.record.version, time.monotonic()))
                        position = reader.positions[STEPS.name, 0]
            except TransportError:
                self._stop.wait(_READ_S)
            except BaseException as exc:  # the edge of the thread: whoever asks next gets it
                self._failure = exc
                return
