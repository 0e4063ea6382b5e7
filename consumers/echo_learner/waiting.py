"""Reports a learner that has no batch: the cause of the wait, and trajectories without rewards. Used from the learner's thread."""

from __future__ import annotations

from echo_bus.clock import Clock
from echo_learner.heartbeat import ProgressHeartbeat
from echo_learner.intake import Intake
from echo_runtime.notices import STANDSTILL_S, Notices, Standstill

# The name of the notice that no batch comes.
_PLACE = "batch"
# Trajectories without rewards named at once: the oldest, so that later calls name the others.
_MAX_NAMED = 256


class Waiting:
    """The learner's wait for its next batch."""

    def __init__(self, intake: Intake, heartbeat: ProgressHeartbeat, notices: Notices, clock: Clock) -> None:
        self._intake = intake
        self._heartbeat = heartbeat
        self._clock = clock
        self._standstill = Standstill(notices, _PLACE, clock)
        self._name_at_s = 0.0
        self._has_named = False

    def begin(self) -> None:
        """Note that the wait begins now: at the start, or after a step."""
        self._standstill.moves()

    def tell(self, version: int, *, is_paused: bool) -> None:
        """Write a notice with the cause, if the wait is long."""

        def why() -> str:
            cause = "The run is paused by an order." if is_paused else self._intake.describe_wait()
            return f"The learner is at version {version}. {cause}"

        self._standstill.stands("No batch", why)

    def name_missing_rewards(self) -> None:
        """Tell the reward applications which trajectories lack a reward, so that they score these again. Raises TransportError."""
        now_s = self._clock.monotonic_s()
        if now_s < self._name_at_s:
            return
        self._name_at_s = now_s + STANDSTILL_S
        missing = self._intake.missing_rewards()
        where = list(dict.fromkeys(place for places in missing.values() for place in places))[:_MAX_NAMED]
        if where or self._has_named:
            self._heartbeat.miss(sorted(missing), where)
        self._has_named = bool(where)
