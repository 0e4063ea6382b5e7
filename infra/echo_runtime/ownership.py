"""Whose namespace it is, as far as a role must know before it joins a group or fences anybody: what learners say on `progress` decides.

One namespace holds one running pipeline. The learner alone claims it (`echo_learner.commit.session`); every other role asks here first:

    a learner of another run speaks           → refused: a reader of ours would commit that run's records unread
    the learner of this start speaks          → go
    nobody speaks, or a learner of this run   → go, or for roles that write what a learner must have accepted: wait

Threads: `await_turn` blocks the caller; a view of `progress` notes on its own thread who speaks.
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from dataclasses import replace

from echo_bus.clock import Deadline
from echo_runtime.process import RoleProcess
from echo_schemas.errors import UserError
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS

logger = logging.getLogger(__name__)

START_VARIABLE = "ECHO_START"
"""Set by whoever starts all roles of a run at once: sessions of the learner that belongs to this start begin with it."""
# Six of a learner's heartbeats.
SILENCE_S = 3.0
_LOOK_S = 0.2


class Turn:
    """Whether a role may begin. Hears from its making on who speaks on `progress`; `close` it, after which it answers no more.

    Used from one thread; a view notes on its own who speaks.
    """

    def __init__(self, process: RoleProcess, *, needs_learner: bool) -> None:
        """`needs_learner`: not before a learner of this run (of this start, if the role was started with others) has accepted it. Others
        only listen for a learner of another run, if there ever was one.
        """
        self._process, self._needs_learner = process, needs_learner
        self._run_id, self._start = process.bus.run_id, process.start
        self._changed = threading.Event()
        self._is_ours = self._is_told = False
        self._other: Progress | None = None
        self._view = replace(process.bus, run_id=None).view(PROGRESS, Progress)
        self._view.on_change(self._note)
        known = self._view.items().values()
        has_others = any(progress.run_id != self._run_id for progress in known)
        self._listens = Deadline.after(SILENCE_S if has_others else 0.0, process.clock)
        # What was said before by a learner of another start may be of one that died.
        if self._start and any(self._is_of_start(progress) for progress in known):
            self._is_ours = True
        process.stop.on_set(self._changed.set)

    def has_come(self) -> bool:
        """Whether the role may begin, now or in a moment: waits a moment for it. Raises UserError if a learner of another run is alive, or
        TransportError.
        """
        self._view.items()
        if self._is_ours:
            return True
        if self._other is not None:
            raise _owned(self._other, self._process)
        if self._listens.expired():
            if not self._needs_learner:
                return True
            if not self._is_told:
                self._is_told = True
                logger.info("Waiting for the learner of %s: nothing is asked before it has accepted the run", self._run_id)
        self._changed.wait(_LOOK_S)
        self._changed.clear()
        return False

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._view.close()

    def _note(self, _: str, progress: Progress | None) -> None:
        if progress is None:
            return
        if progress.run_id != self._run_id:
            self._other = progress
        elif self._is_of_start(progress):
            self._is_ours = True
        self._changed.set()

    def _is_of_start(self, progress: Progress) -> bool:
        return progress.run_id == self._run_id and progress.session.startswith(self._start)


def await_turn(process: RoleProcess, *, needs_learner: bool) -> bool:
    """Wait until the role may begin; False if `process.stop` came first. Raises as `Turn.has_come`."""
    with closing(Turn(process, needs_learner=needs_learner)) as turn:
        while not process.stop.is_set():
            if turn.has_come():
                return True
    return False


def _owned(other: Progress, process: RoleProcess) -> UserError:
    return UserError(
        f"The namespace {process.bus.namespace.name!r} belongs to run {other.run_id!r}, whose learner is alive (session {other.session}); "
        f"a role of {process.bus.run_id!r} would take its records away from it.",
        hint="Give this run a [kafka] namespace of its own, or stop the other one first.",
    )
