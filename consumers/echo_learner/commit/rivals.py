"""Whether another learner is at work in this namespace: a learner that has nothing to commit would not be told by the cluster.

Threads: the view of `progress` notes on its own thread who else speaks; `check` belongs to the learner's, which reads the log then.
"""

from __future__ import annotations

from collections.abc import Callable

from echo_bus.errors import ProducerFenced
from echo_bus.reading.view import CompactedView
from echo_schemas.records import Progress, SessionClaim


class Rivals:
    """Sessions other than `session` that were heard after it began."""

    def __init__(self, progress: CompactedView[Progress], session: str, newest_claim: Callable[[], SessionClaim | None]) -> None:
        """`newest_claim` reads the log. `progress` of every run of the namespace; whoever opened it closes it."""
        self._session = session
        self._newest_claim = newest_claim
        self._known = {session}
        self._heard: str | None = None
        progress.on_change(self._note)

    def check(self) -> None:
        """Raise ProducerFenced if somebody else speaks and the newest claim is not ours. One who was fenced may speak on for a while.

        Raises TransportError if the log cannot be read.
        """
        heard, self._heard = self._heard, None
        if heard is None:
            return
        claim = self._newest_claim()
        if claim is not None and claim.session != self._session:
            raise ProducerFenced(
                f"Session {claim.session} of run {claim.run_id!r} has claimed this namespace; {self._session} commits nothing any more.",
                hint="Let one of the two go on.",
            )
        self._known.add(heard)

    def _note(self, _: str, progress: Progress | None) -> None:
        if progress is not None and progress.session not in self._known:
            self._heard = progress.session
