"""The time limit of a request, from the durations of earlier requests and steps; and the duration of a step. Pure."""

from __future__ import annotations

import statistics
from collections import deque

# Under pace a request is trained within budget + 1 steps; twice that is too long, and so is four times the slowest of the last requests.
_ROUNDS, _TURNS = 2, 4
_NUM_TURNS = 256
_NUM_STEPS = 5


class Patience:
    """The time limit of a request from its issue: after it the request counts as expired, or its worker as stuck.

    With S = 3, steps of 1,600 s and requests that took up to 400 s: max(600, 2 · 4 · 1,600, 4 · 400) = 12,800 s."""

    def __init__(self, *, least_s: float, num_steps: int) -> None:
        """`num_steps`: a request is trained within so many steps; 0 if it waits for none."""
        self._least_s = least_s
        self._num_steps = num_steps
        self._took_s: deque[float] = deque(maxlen=_NUM_TURNS)

    def finished(self, took_s: float) -> None:
        """Add the time that a finished request took since its issue."""
        self._took_s.append(took_s)

    def limit_s(self, step_s: float | None = 0.0) -> float | None:
        """The limit; None until a step and a request were measured."""
        if step_s is None or not self._took_s:
            return None
        return max(self._least_s, _ROUNDS * self._num_steps * step_s, _TURNS * max(self._took_s))


class StepPace:
    """Seconds per training step: the median of the last five, from the versions that an observer sees."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._since_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def saw(self, version: int, now_s: float) -> None:
        """The learner is at `version`. The first version seen is not measured, because it may be old; nor is a lower one."""
        if self._version is not None and version > self._version:
            self._steps_s.append((now_s - self._since_s) / (version - self._version))
        if version != self._version:
            self._version, self._since_s = version, now_s

    @property
    def step_s(self) -> float | None:
        """None until one step was seen from its beginning to its end."""
        return statistics.median(self._steps_s) if self._steps_s else None
