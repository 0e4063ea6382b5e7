"""What a learner says while no batch comes: for what it waits, and which trajectories lack a reward. Used from the learner's thread."""

from __future__ import annotations

from echo_bus.clock import Clock
from echo_learner.heartbeat import ProgressHeartbeat
from echo_learner.intake import Intake
from echo_runtime.notices import STANDSTILL_S, Notices, Standstill

# The place of the notice that no batch comes.
_PLACE = "batch"
# Records of which the learner says at once that their rewards are missing; the oldest, so that the others' turn comes.
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
        """The wait begins now: at the start, or after a step."""
        self._standstill.moves()

    def tell(self, version: int, *, is_paused: bool) -> None:
        """Say for what the learner waits, if it waits for long."""

        def why() -> str:
            cause = "The run is paused by an order." if is_paused else self._intake.describe_wait()
            return f"The learner is at version {version}. {cause}"

        self._standstill.stands("No batch", why)

    def name_missing_rewards(self) -> None:
        """Let whoever judges look again at what stays without a reward, whoever has committed it. Raises TransportError."""
        now_s = self._clock.monotonic_s()
        if now_s < self._name_at_s:
            return
        self._name_at_s = now_s + STANDSTILL_S
        missing = self._intake.missing_rewards()
        where = list(dict.fromkeys(place for places in missing.values() for place in places))[:_MAX_NAMED]
        if where or self._has_named:
            self._heartbeat.miss(sorted(missing), where)
        self._has_named = bool(where)
