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
from collections.abc import Mapping
from dataclasses import replace

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.process import RoleProcess
from echo_schemas.errors import UserError
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS

logger = logging.getLogger(__name__)

START_VARIABLE = "ECHO_START"
"""Set by whoever starts all roles of a run at once: sessions of the learner that belongs to this start begin with it."""
# Six of a learner's heartbeats.
SILENCE_S = 3.0
_LOOK_S = 0.2


class _Speakers:
    """Who has spoken on `progress` since it was opened."""

    def __init__(self, bus: Bus, start: str) -> None:
        self._run_id, self._start = bus.run_id, start
        self.changed = threading.Event()
        self.is_ours = False
        self.other: Progress | None = None
        self.view = replace(bus, run_id=None).view(PROGRESS, Progress)
        self.view.on_change(self._note)
        known: Mapping[str, Progress] = self.view.items()
        self.others_known = any(progress.run_id != self._run_id for progress in known.values())
        self.is_ours |= bool(start) and any(self._is_of_start(progress) for progress in known.values())

    def _note(self, _: str, progress: Progress | None) -> None:
        if progress is None:
            return
        if progress.run_id != self._run_id:
            self.other = progress
        elif self._is_of_start(progress):
            self.is_ours = True
        self.changed.set()

    def _is_of_start(self, progress: Progress) -> bool:
        return progress.run_id == self._run_id and progress.session.startswith(self._start)


def await_turn(process: RoleProcess, *, needs_learner: bool) -> bool:
    """Wait until the role may begin; False if `process.stop` came first. `needs_learner`: not before a learner of this run (of this start,
    if the role was started with others) has accepted it. Others only listen for a learner of another run, if there ever was one.

    Raises UserError if one is alive; TransportError.
    """
    stop = process.stop
    speakers = _Speakers(process.bus, process.start)
    stop.on_set(speakers.changed.set)
    try:
        listens = Deadline.after(SILENCE_S if speakers.others_known else 0.0, process.clock)
        is_told = False
        while not stop.is_set():
            speakers.view.items()
            if speakers.is_ours:
                return True
            if speakers.other is not None:
                raise _owned(speakers.other, process)
            if listens.expired():
                if not needs_learner:
                    return True
                if not is_told:
                    is_told = True
                    logger.info("Waiting for the learner of %s: nothing is asked before it has accepted the run", process.bus.run_id)
            speakers.changed.wait(_LOOK_S)
            speakers.changed.clear()
        return False
    finally:
        speakers.view.close()


def _owned(other: Progress, process: RoleProcess) -> UserError:
    return UserError(
        f"The namespace {process.bus.namespace.name!r} belongs to run {other.run_id!r}, whose learner is alive (session {other.session}); "
        f"a role of {process.bus.run_id!r} would take its records away from it.",
        hint="Give this run a [kafka] namespace of its own, or stop the other one first.",
    )
