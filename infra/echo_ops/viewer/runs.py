"""The other runs of the namespace, for comparing curves: their reports, read at the first request and then followed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_replay.run_log import RunLog, StepsFollower
from echo_schemas.errors import UserError
from echo_schemas.records import Run, StepReport
from echo_schemas.topics import RUNS

# Runs whose reports are kept: some fifty bytes per sample.
_MOST_KEPT = 4
_EVERY_S = 4.0


@dataclass(slots=True)
class _Followed:
    log: RunLog
    follower: StepsFollower
    read_s: float


class OtherRuns:
    """Thread-safe: one thread reads at a time. `close` it."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._lock = threading.Lock()
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._runs: dict[str, Run] = {}
        self._listed_s: float | None = None

    def close(self) -> None:
        with self._lock:
            for each in self._followed.values():
                each.follower.close()
            self._followed.clear()

    def known(self) -> dict[str, Run]:
        """Every run of the namespace by name. Raises TransportError."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self._listed_s is None or now_s - self._listed_s > _EVERY_S:
                self._runs, self._listed_s = replace(self._bus, run_id=None).newest(RUNS, Run), now_s
            return dict(self._runs)

    def reports(self, run_id: str) -> Sequence[StepReport]:
        """The reports of every step of a run. Raises UserError for an unknown run; TransportError."""
        if run_id not in self.known():
            raise UserError(f"The namespace knows no run {run_id!r}.", hint="The page of metrics names those that there are.")
        with self._lock:
            followed = self._followed.get(run_id)
            if followed is None:
                followed = self._open(run_id)
            elif self._clock.monotonic_s() - followed.read_s > _EVERY_S:
                followed.follower.read()
                followed.read_s = self._clock.monotonic_s()
            self._followed.move_to_end(run_id)
            return [step.report for step in followed.log.steps]

    def _open(self, run_id: str) -> _Followed:
        log = RunLog(run_id)
        follower = StepsFollower(replace(self._bus, run_id=run_id), log)
        try:
            follower.read()
        except BaseException:  # also an interrupt: close the client
            follower.close()
            raise
        while len(self._followed) >= _MOST_KEPT:
            self._followed.popitem(last=False)[1].follower.close()
        self._followed[run_id] = followed = _Followed(log, follower, self._clock.monotonic_s())
        return followed
