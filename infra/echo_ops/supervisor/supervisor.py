"""A run from its first process to its last.

    broker thread:   Kafka up ─▶ topics applied ─▶ `runs` written ─▶ observer follows
    this thread:     roles started at once (imports take longest) ─▶ watch ─▶ learner done, Ctrl-C, or a death ─▶ drain ─▶ Kafka down

Nothing is restarted, except a worker that one order has ended and a later one calls ([coordinator] machines). Threads: `run` blocks the
caller, which must be the main thread (signals). The first SIGINT or SIGTERM drains, the second ends everything at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Protocol

from echo_bus.clock import Clock
from echo_ops.supervisor.child import Crew, how_ended
from echo_ops.supervisor.plan import ChildPlan

logger = logging.getLogger(__name__)

_TICK_S = 0.1
# A role ends itself when its time to drain is over. A role that does not is killed this much later.
_GRACE_S = 1.0


class RunEnd(StrEnum):
    """How a run ended. The death of a role is an exception instead."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """By an order: the learner ended with exit code 0 before its last step."""
    INTERRUPTED = "interrupted"


class Broker(Protocol):
    """The run's Kafka."""

    def start(self) -> None:
        """Blocks until it answers."""

    def stop(self) -> None:
        """Stop it if `start` started it; idempotent."""


class Watcher(Protocol):
    def tick(self) -> None:
        """Called ten times a second."""

    def say(self, line: str) -> None:
        """Show one line."""

    def prepare(self) -> None:
        """Called when Kafka answers."""

    def conclude(self) -> None:
        """Called before Kafka stops."""


class SecondSignal(Exception):
    """A second signal came during the drain: end everything at once."""


class Supervisor:
    def __init__(
        self,
        crew: Crew,
        broker: Broker,
        watcher: Watcher,
        clock: Clock,
        *,
        drain_s: float,
        released: Callable[[], Set[str]] = frozenset,
    ) -> None:
        """`drain_s`: the longest time that a role takes to drain. `released`: names of workers that must not run now."""
        self._crew = crew
        self._broker = broker
        self._watcher = watcher
        self._clock = clock
        self._drain_s = drain_s
        self._released = released
        self._signals = 0
        self._woken = threading.Event()
        self._preparation_error: BaseException | None = None
        self._prepared = threading.Event()

    def run(self, plans: Sequence[ChildPlan]) -> RunEnd:
        """Start, watch, end. Raises RoleDied, and the errors of `prepare` and the broker's start, after everything has ended."""
        preparation = threading.Thread(target=self._prepare, name="broker", daemon=True)
        with self._own_signals():
            try:
                preparation.start()
                self._crew.start(plans)
                outcome = self._watch()
                self._drain(outcome)
            except SecondSignal:
                outcome = RunEnd.INTERRUPTED
            finally:
                # No child is left after a drain; after an error some may be.
                self._crew.kill()
                preparation.join()
                self._conclude()
        return outcome

    def interrupt(self) -> None:
        """Do as a signal does. The next tick sees it: a handler that set an event would wait for a lock that its own thread may hold."""
        self._signals += 1

    def _watch(self) -> RunEnd:
        while True:
            if self._preparation_error is not None:
                raise self._preparation_error
            if self._signals:
                return RunEnd.INTERRUPTED
            is_finished = self._crew.check()
            for plan, exit_code in self._crew.take_lost():
                self._watcher.say(f"{plan.name} {how_ended(exit_code)}; the run goes on with the other workers. Its log: {plan.log}")
            if is_finished:
                return RunEnd.FINISHED
            for line in self._crew.obey(self._released()):
                self._watcher.say(line)
            self._tick()

    def _drain(self, outcome: RunEnd) -> None:
        """Drain all roles at once. A record for a role that has ended stays in the log for the next start of the run."""
        seen = self._signals
        if outcome is RunEnd.INTERRUPTED:
            self._watcher.say("Draining")

        def tick() -> None:
            self._tick()
            if self._signals > max(seen, 1):
                raise SecondSignal

        for plan in self._crew.drain(patience_s=self._drain_s + _GRACE_S, tick=tick):
            self._watcher.say(f"{plan.name} did not drain in time and was killed; its log: {plan.log}")

    def _conclude(self) -> None:
        try:
            if self._prepared.is_set():
                self._watcher.conclude()
        finally:
            self._broker.stop()

    def _prepare(self) -> None:
        try:
            self._broker.start()
            self._watcher.prepare()
            self._prepared.set()
        except BaseException as exc:  # the edge of the thread: the main thread raises it
            self._preparation_error = exc
            self._woken.set()

    def _tick(self) -> None:
        self._watcher.tick()
        self._woken.wait(_TICK_S)
        self._woken.clear()

    @contextmanager
    def _own_signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.interrupt()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
