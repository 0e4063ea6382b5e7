"""How long a request may take, by what requests and steps have taken so far; and how long a step takes. Pure."""

from __future__ import annotations

import statistics
from collections import deque

# What pace lets in is trained within budget + 1 steps, and twice that is too long; so is four times what the slowest of the last requests
# took.
_ROUNDS, _TURNS = 2, 4
_NUM_TURNS = 256
_NUM_STEPS = 5


class Patience:
    """From the issue of a request to its end: after that it counts as expired, or whoever has it as stuck.

    With S = 3, steps of 1,600 s and requests that took up to 400 s: max(600, 2 · 4 · 1,600, 4 · 400) = 12,800 s.
    """

    def __init__(self, *, least_s: float, num_steps: int) -> None:
        """`num_steps`: within so many steps a request is trained; 0 where it waits for none."""
        self._least_s = least_s
        self._num_steps = num_steps
        self._took_s: deque[float] = deque(maxlen=_NUM_TURNS)

    def finished(self, took_s: float) -> None:
        """A request was done so long after its issue."""
        self._took_s.append(took_s)

    def limit_s(self, step_s: float | None = 0.0) -> float | None:
        """None before a step and a request were measured: nobody knows then whether an hour is long."""
        if step_s is None or not self._took_s:
            return None
        return max(self._least_s, _ROUNDS * self._num_steps * step_s, _TURNS * max(self._took_s))


class StepPace:
    """Seconds per training step: the median of the last five, as somebody sees versions go by."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._since_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def saw(self, version: int, now_s: float) -> None:
        """The learner is at `version`. The first one seen may have been reached long ago and measures nothing; nor does a lower one."""
        if self._version is not None and version > self._version:
            self._steps_s.append((now_s - self._since_s) / (version - self._version))
        if version != self._version:
            self._version, self._since_s = version, now_s

    @property
    def step_s(self) -> float | None:
        """None before the first step was seen from its beginning to its end."""
        return statistics.median(self._steps_s) if self._steps_s else None
