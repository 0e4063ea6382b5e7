"""Which requests without a group become dead letters, so that the learner closes their seqs.

published ───────────────▶ none: the learner reads the trajectories
with a receipt ──────────▶ none: the requester reads the receipt, and decides
failed ──────────────────▶ dead letter, at once: it would fail again
expired, not ready ──────▶ none: the feeder issues it again; after `resends` times a dead letter
"""

from __future__ import annotations

from collections import deque

from echo_bus.errors import TooManyDeadLetters
from echo_bus.message import Invalid
from echo_rollout.intake import Work
from echo_rollout.publishing import Ending, GroupEnd
from echo_runtime.notices import Notices
from echo_schemas.errors import InvalidReason
from echo_schemas.records import Purpose

# A worker that fails at so many groups in a row has a broken environment or engine, and would lose every request that it takes.
_MOST_FAILED = 100
# Half of so many last groups failed: the run gets on slowly, and its operator should know why.
_LOOKED_AT = 16
_PLACE = "failing"


class Refusals:
    """Decides for one worker, and says in `notices` why groups fail."""

    def __init__(self, worker_id: str, notices: Notices, *, resends: int) -> None:
        self._worker_id = worker_id
        self._notices = notices
        self._resends = resends
        self._in_a_row = 0
        self._last = ""
        self._failed: deque[bool] = deque(maxlen=_LOOKED_AT)

    def refusal_of(self, work: Work, ending: Ending) -> Invalid | None:
        """Why the request becomes a dead letter after this ending; None if it does not."""
        request, outcome = work.request, ending.outcome
        if work.asked is not None:
            return None
        if outcome in {GroupEnd.PUBLISHED, GroupEnd.FAILED}:
            self._note(ending)
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

    def _note(self, ending: Ending) -> None:
        self._failed.append(ending.outcome is GroupEnd.FAILED)
        num_failed = sum(self._failed)
        if 2 * num_failed < _LOOKED_AT:
            self._notices.clear(_PLACE)
        elif self._failed[-1]:
            self._notices.say(
                _PLACE,
                f"{num_failed} of the last {len(self._failed)} groups were given up, the last one because: {ending.said} "
                "Their requests are dead letters, and the run asks for others.",
            )

    def check(self) -> None:
        """Raise TooManyDeadLetters after more than `_MOST_FAILED` failures in a row."""
        if self._in_a_row > _MOST_FAILED:
            raise TooManyDeadLetters(
                f"{_MOST_FAILED} groups failed in a row at this worker, the last one because: {self._last}",
                hint="Mend its environment or engine and start it again. Their requests are dead letters; the run asks for others.",
            )
