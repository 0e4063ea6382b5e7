"""Requests that yield no group and of which nobody hears otherwise: which become dead letters, so that the learner closes their seqs.

published ───────────────▶ the trajectories tell
somebody wants a receipt ─▶ the receipt tells, and who asked decides
failed ──────────────────▶ dead letter, at once: it would fail again
expired, not ready ──────▶ nothing, so that it is issued again; after `resends` times a dead letter

"""

from __future__ import annotations

from echo_bus.errors import TooManyDeadLetters
from echo_bus.message import Invalid
from echo_rollout.intake import Work
from echo_rollout.publishing import Ending, GroupEnd
from echo_schemas.errors import InvalidReason
from echo_schemas.records import Purpose

# A worker that fails at so many groups one after the other fails at all: its environment or engine is broken, and what it takes is lost.
_MOST_FAILED = 100


class Refusals:
    """Decides for one worker."""

    def __init__(self, worker_id: str, *, resends: int) -> None:
        self._worker_id = worker_id
        self._resends = resends
        self._in_a_row = 0
        self._last = ""

    def refusal_of(self, work: Work, ending: Ending) -> Invalid | None:
        """Why the request of a group that ended so is a dead letter; None if it is none."""
        request, outcome = work.request, ending.outcome
        if work.asked is not None:
            return None
        if outcome is GroupEnd.PUBLISHED:
            self._in_a_row = 0
        elif outcome is GroupEnd.FAILED:
            why = f"Worker {self._worker_id} can make no group of it: {(ending.failure or outcome).value}: {ending.said}"
            self._in_a_row, self._last = self._in_a_row + 1, why
            return Invalid(InvalidReason.HANDLER_REFUSED, why)
        elif outcome in {GroupEnd.EXPIRED, GroupEnd.NOT_READY} and request.purpose is Purpose.TRAIN and request.resends >= self._resends:
            why = f"Issued {request.resends + 1} times, the last one to worker {self._worker_id}: {outcome.value}: {ending.said}"
            return Invalid(InvalidReason.RETRIES_EXHAUSTED, why)
        return None

    def check(self) -> None:
        """Raise TooManyDeadLetters where nothing but failures came in a row."""
        if self._in_a_row > _MOST_FAILED:
            raise TooManyDeadLetters(
                f"{_MOST_FAILED} groups failed in a row at this worker, the last one because: {self._last}",
                hint="Mend its environment or engine and start it again. Their requests are dead letters; the run asks for others.",
            )
