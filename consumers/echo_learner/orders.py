"""Orders to a learner that trains, from `control` or from the file: to pause, to stop, and which rewards count.

Used from the learner's thread.
"""

from __future__ import annotations

import logging
from contextlib import closing

from echo_bus.bus import Bus
from echo_bus.reading.view import CompactedView
from echo_learner.intake import Intake
from echo_learner.reward_watch import FailingReward, RewardWatch, without
from echo_schemas.errors import UserError
from echo_schemas.records import Control, RewardTerm, RunState, ordered_state
from echo_settings import Settings

logger = logging.getLogger(__name__)


def refuse_stopped(bus: Bus, run_id: str) -> None:
    """Raise UserError for a run with a standing order to stop."""
    with closing(bus.orders()) as control:
        order = control.get(f"{run_id}/run")
    if order is not None and ordered_state(order) is RunState.STOPPING:
        raise UserError(f"{run_id} was told to stop, by {order.issued_by}.", hint=f"`echoswarm runs resume {run_id}` lets it go on.")


class RunOrders:
    """The orders of one run, and the reward specification in force."""

    def __init__(
        self, settings: Settings, control: CompactedView[Control], rewards: RewardWatch, intake: Intake, terms: tuple[RewardTerm, ...]
    ) -> None:  # fmt: skip
        """`terms`: the specification that the checkpoint holds."""
        self.terms = terms
        """The reward specification of the next batch."""
        self._run_id = settings.run.name
        self._ends_for_failing = settings.scoring.when_failing == "stop"
        self._control = control
        self._rewards = rewards
        self._intake = intake
        self._given_up: frozenset[str] = frozenset()

    @property
    def is_paused(self) -> bool:
        return self._state is RunState.PAUSED

    @property
    def is_stopping(self) -> bool:
        return self._state is RunState.STOPPING

    @property
    def _state(self) -> RunState:
        return ordered_state(self._control.get(f"{self._run_id}/run"))

    def obey(self, version: int) -> None:
        """Let a new reward specification take effect at max(ordered version, learner version + 1). `version`: of the learner."""
        order = self._control.get(f"{self._run_id}/rewards")
        if order is None or order.rewards is None or order.rewards.from_version > version + 1:
            return
        terms = without(order.rewards.terms, self._given_up)
        if terms != self.terms:
            self._set_terms(terms, version)

    def face_failing_reward(self, version: int) -> UserError | None:
        """Handle a reward that only fails, for which every group would wait: the error that ends the run, or None if the run goes on
        without that reward, or if no reward fails."""
        failing = self._rewards.hopeless(self.terms)
        if failing is None:
            return None
        terms = without(self.terms, self._given_up | {failing.name})
        others = any(term.is_awaited for term in terms)
        if self._ends_for_failing or not others:
            return _the_end(failing, version, others=others)
        self._given_up |= {failing.name}
        logger.warning("%s The run goes on without it ([scoring] when_failing).", failing)
        self._set_terms(terms, version)
        return None

    def _set_terms(self, terms: tuple[RewardTerm, ...], version: int) -> None:
        self.terms = terms
        self._intake.set_terms(terms)
        logger.info("From version %d on the reward is %s", version + 1, ", ".join(f"{term.weight:g} {term.name}" for term in terms))


def _the_end(failing: FailingReward, version: int, *, others: bool) -> UserError:
    on = ' [scoring] when_failing = "go_on" trains on without it.' if others else ""
    return UserError(
        f"{failing} Without it no batch comes, so the run ends at version {version}.",
        hint=f"Mend the reward and start again with the same command: the run goes on where it is.{on}",
    )
