"""Detects another learner in this namespace: the cluster tells a fenced learner only when it commits.

Threads: the view's thread of `progress` notes other sessions; the learner's thread calls `check`, which then reads the log.
"""

from __future__ import annotations

from collections.abc import Callable

from echo_bus.errors import ProducerFenced
from echo_bus.reading.view import CompactedView
from echo_schemas.records import Progress, SessionClaim


class Rivals:
    """Sessions other than `session` whose heartbeats were read after it began."""

    def __init__(self, progress: CompactedView[Progress], session: str, newest_claim: Callable[[], SessionClaim | None]) -> None:
        """`progress`: of every run of the namespace; the caller closes it. `newest_claim` reads the log."""
        self._session = session
        self._newest_claim = newest_claim
        self._known = {session}
        self._heard: str | None = None
        progress.on_change(self._note)

    def check(self) -> None:
        """Raise ProducerFenced if another session heartbeats and the newest claim is not ours. A fenced session may heartbeat for a while.

        Raises TransportError if the log cannot be read.
        """
        heard, self._heard = self._heard, None
        if heard is None:
            return
        claim = self._newest_claim()
        if claim is not None and claim.session != self._session:
            raise ProducerFenced(
                f"Session {claim.session} of run {claim.run_id!r} has claimed this namespace; {self._session} commits nothing any more.",
                hint="Stop one of the two learners.",
            )
        self._known.add(heard)

    def _note(self, _: str, progress: Progress | None) -> None:
        if progress is not None and progress.session not in self._known:
            self._heard = progress.session
