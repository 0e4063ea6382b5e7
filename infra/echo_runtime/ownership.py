"""Which run owns the namespace: a role checks this before it joins a group or fences another process. Learners' records on `progress` tell.

One namespace holds one running pipeline. Only the learner claims it (`echo_learner.commit.session`); every other role checks here first:

    a learner of another run is alive         → refuse: this role would commit that run's records unread
    the learner of this start is alive        → go
    no learner, or one of this run            → go; roles that need an accepting learner wait

Threads: `await_turn` blocks the caller; a view of `progress` reads on its own thread.
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
"""Set by the command that starts all roles of a run together; the sessions of that start's learner begin with its value."""
# Six of a learner's heartbeats.
SILENCE_S = 3.0
_LOOK_S = 0.2


class Turn:
    """Whether a role may begin. Reads `progress` from its creation on; `close` it. Used from one thread, besides the view's."""

    def __init__(self, process: RoleProcess, *, needs_learner: bool) -> None:
        """`needs_learner`: wait until a learner of this run (of this start, if the role was started with others) has accepted it. Other
        roles only check for a learner of another run, if `progress` knows one.
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
        # Earlier records of another start's learner may be of one that died.
        if self._start and any(self._is_of_start(progress) for progress in known):
            self._is_ours = True
        process.stop.on_set(self._changed.set)

    def has_come(self) -> bool:
        """Whether the role may begin; waits 0.2 s for it. Raises UserError if a learner of another run is alive; TransportError."""
        self._view.items()
        if self._is_ours:
            return True
        if (other := self._other) is not None:
            raise UserError(
                f"The namespace {self._process.bus.namespace.name!r} belongs to run {other.run_id!r}, whose learner is alive (session "
                f"{other.session}); a role of {self._run_id!r} would take its records away from it.",
                hint="Give this run a [kafka] namespace of its own, or stop the other one first.",
            )
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
