"""One role as a child process: its log file, its end, and the crew of all of them.

One thread owns a crew. Children do not see the terminal's Ctrl-C (their session is their own) and die with this process (`Guard`).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from echo_bus.client.kafka import CLIENT_LOG
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import TransportError
from echo_embedded.guard import Guard
from echo_embedded.out_of_memory import OutOfMemoryWatch
from echo_embedded.process import last_lines
from echo_ops.roles import Role
from echo_ops.supervisor.plan import ChildPlan
from echo_schemas.errors import UserError

_NUM_SHOWN_LINES = 15
# What a role ends with after a UserError (`echo_ops.cli.output.ExitCode`).
_USAGE = 2
# Kept out of children: without byte code vLLM takes three times as long to import.
_UNWANTED = frozenset({"PYTHONDONTWRITEBYTECODE"})


class Child(Protocol):
    """What the crew needs of a process. Of its log, what lies before the byte `log_start` is of earlier processes."""

    plan: ChildPlan
    log_start: int

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def terminate(self) -> None:
        """Ask it to drain."""

    def kill(self) -> None:
        """End it at once, and reap it."""


class RoleDied(TransportError):
    """A role ended before its run did; the message has its last log lines. `killed_by`: what is known of who sent a SIGKILL."""

    def __init__(self, plan: ChildPlan, exit_code: int, lines: Sequence[str], killed_by: str = "") -> None:
        how = how_ended(exit_code)
        message = (
            f"The {plan.role.value} {plan.name!r} {how}, so the run has ended."
            if plan.name != plan.role
            else (f"The {plan.role.value} {how}, so the run has ended.")
        )
        if lines:
            message += " Its last log lines:\n" + "\n".join(f"  {line}" for line in lines) + "\n"
        hint = f"The whole log: {plan.log}."
        if exit_code == -signal.SIGKILL and killed_by:
            hint += f" {killed_by}"
        super().__init__(message, hint=hint)
        self.plan = plan
        self.exit_code = exit_code


class RoleRefused(RoleDied, UserError):
    """A role ended because of a mistake in the file, a flag or the environment; its last lines say which."""


def how_ended(exit_code: int) -> str:
    """`was killed by SIGTERM` or `ended with exit code 1`."""
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


class ProcessChild:
    """A real process. Its output is appended to the plan's log."""

    def __init__(self, plan: ChildPlan, guard: Guard, environ: Mapping[str, str] = os.environ) -> None:
        self.plan = plan
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        self.log_start = plan.log.stat().st_size if plan.log.exists() else 0
        plan.announce.unlink(missing_ok=True)
        merged = {**plan.environ, **{name: value for name, value in environ.items() if name not in _UNWANTED}}
        # Settings of this run win over the environment; the machine's placement does not.
        merged |= {name: value for name, value in plan.environ.items() if name.startswith("ECHO_")}
        with plan.log.open("ab") as log:
            self._popen = subprocess.Popen(
                plan.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=merged, start_new_session=True
            )
        if plan.cores and hasattr(os, "sched_setaffinity"):
            # A core that a container does not lend is no reason not to run.
            with suppress(OSError):
                os.sched_setaffinity(self._popen.pid, plan.cores)
        self._guard: Guard | None = guard
        guard.protect(self._popen.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def poll(self) -> int | None:
        code = self._popen.poll()
        if code is not None and self._guard is not None:
            self._guard.release(self._popen.pid)
            self._guard = None
        return code

    def terminate(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        self.poll()


Launch = Callable[[ChildPlan], Child]


@dataclass(frozen=True, slots=True)
class Killed:
    """A child that did not drain in time."""

    plan: ChildPlan


class Crew:
    """The children of a run."""

    def __init__(self, launch: Launch, clock: Clock) -> None:
        self._launch = launch
        self._clock = clock
        self.children: list[Child] = []
        self._lost: dict[str, tuple[ChildPlan, int]] = {}
        self._told: set[str] = set()
        self._released: set[str] = set()
        self._memory = OutOfMemoryWatch()

    def start(self, plans: Iterable[ChildPlan]) -> None:
        """Start them all, one after the other, without waiting for any."""
        for plan in plans:
            self.children.append(self._launch(plan))

    def check(self) -> bool:
        """Whether the learner has ended as it should. Who writes requests may end well before, and a worker while another one works: what
        it had in hand is delivered again (`take_lost` tells of it). Raises RoleDied if any other process ended, or one of these otherwise.
        """
        finished = False
        kept = [child for child in self.children if child.plan.name not in self._released]
        # One that was released can be called in the place of the last one.
        works_on = bool(self._released) or any(child.plan.role is Role.WORKER and child.poll() is None for child in kept)
        for child in kept:
            code = child.poll()
            if code is None:
                continue
            if child.plan.role is Role.LEARNER and code == 0:
                finished = True
            elif child.plan.role is Role.WORKER and works_on:
                self._lost.setdefault(child.plan.name, (child.plan, code))
            elif child.plan.role not in {Role.OFFLINE, Role.FEEDER} or code != 0:
                died = RoleRefused if code == _USAGE else RoleDied
                raise died(child.plan, code, _last_words(child.plan.log, child.log_start), self._memory.verdict())
        return finished

    def take_lost(self) -> list[tuple[ChildPlan, int]]:
        """Workers that have ended since this was last asked, with their exit codes, while others work on."""
        new = [lost for name, lost in self._lost.items() if name not in self._told]
        self._told.update(self._lost)
        return new

    def obey(self, released: Set[str]) -> list[str]:
        """End the workers of these names, and start those again that were ended so and are not among them any more, once they have ended.
        Returns a line for each change. What a worker that is ended has in hand it hands back.
        """
        lines = []
        for index, child in enumerate(self.children):
            name = child.plan.name
            if child.plan.role is not Role.WORKER or (name in released) is (name in self._released):
                continue
            if name in released:
                self._released.add(name)
                child.terminate()
                lines.append(f"{name} is not needed: its process ends")
            elif child.poll() is not None:
                self._released.discard(name)
                self._lost.pop(name, None)
                self._told.discard(name)
                self.children[index] = self._launch(child.plan)
                lines.append(f"{name} is called: its process starts")
        return lines

    def drain(self, *, patience_s: float, tick: Callable[[], None]) -> list[Killed]:
        """Ask all at once to drain and wait; who takes longer than `patience_s` is killed. `tick` is called while waiting."""
        for child in self.children:
            child.terminate()
        deadline = Deadline.after(patience_s, self._clock)
        while any(child.poll() is None for child in self.children) and not deadline.expired():
            tick()
        late = [child for child in self.children if child.poll() is None]
        for child in late:
            child.kill()
        for child in self.children:
            # Told to end, it is not missed.
            child.plan.announce.unlink(missing_ok=True)
        return [Killed(child.plan) for child in late]

    def kill(self) -> None:
        """End everything at once."""
        for child in self.children:
            child.kill()


def _last_words(log: Path, start: int) -> list[str]:
    """The end of a role's log from byte `start` on, without the hundreds of lines that its Kafka clients say of connections."""
    return [line for line in last_lines(log, start) if CLIENT_LOG not in line][-_NUM_SHOWN_LINES:]
