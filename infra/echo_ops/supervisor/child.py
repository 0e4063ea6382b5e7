"""One role as a child process: its log file, its end, and the crew of all children.

One thread owns a crew. A child has a session of its own, so the terminal's Ctrl-C does not reach it. It dies with this process (`Guard`).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from echo_bus.client.kafka import CLIENT_LOG
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import TransportError
from echo_embedded.guard import Guard
from echo_embedded.memory import OutOfMemoryWatch
from echo_embedded.process import last_lines
from echo_ops.roles import Role
from echo_ops.supervisor.plan import ChildPlan
from echo_schemas.errors import UserError

_NUM_SHOWN_LINES = 15
# Exit code of a role after a UserError (`echo_ops.cli.output.ExitCode`).
_USAGE = 2
# Not passed to children: without byte code vLLM takes three times as long to import.
_UNWANTED = frozenset({"PYTHONDONTWRITEBYTECODE"})


class Child(Protocol):
    """What the crew needs of a process. Its part of the log begins at the byte `log_start`."""

    plan: ChildPlan
    log_start: int

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def terminate(self) -> None:
        """Ask it to drain."""

    def kill(self) -> None:
        """End it at once, and reap it."""


class RoleDied(TransportError):
    """A role ended before its run; the message has its last log lines. `killed_by`: a sentence on the sender of a SIGKILL, if known."""

    def __init__(self, plan: ChildPlan, exit_code: int, lines: Sequence[str], killed_by: str = "") -> None:
        name = f" {plan.name!r}" if plan.name != plan.role else ""
        message = f"The {plan.role.value}{name} {how_ended(exit_code)}, so the run has ended."
        if lines:
            message += " Its last log lines:\n" + "\n".join(f"  {line}" for line in lines) + "\n"
        hint = f"The whole log: {plan.log}."
        if exit_code == -signal.SIGKILL and killed_by:
            hint += f" {killed_by}"
        super().__init__(message, hint=hint)
        self.plan = plan
        self.exit_code = exit_code


class RoleRefused(RoleDied, UserError):
    """A role ended because of a mistake in the file, a flag or the environment; its last log lines name it."""


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
        # The run's settings override the environment; the placement on this machine does not.
        merged |= {name: value for name, value in plan.environ.items() if name.startswith("ECHO_")}
        with plan.log.open("ab") as log:
            self._popen = subprocess.Popen(
                plan.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=merged, start_new_session=True
            )
        if plan.cores and hasattr(os, "sched_setaffinity"):
            # A container may refuse a core; the role runs all the same.
            with suppress(OSError):
                os.sched_setaffinity(self._popen.pid, plan.cores)
        self._guard: Guard | None = guard
        guard.protect(self._popen.pid)

    @property
    def pid(self) -> int:
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


class Crew:
    def __init__(self, launch: Launch, clock: Clock) -> None:
        self._launch = launch
        self._clock = clock
        self.children: list[Child] = []
        self._lost: dict[str, tuple[ChildPlan, int]] = {}
        self._told: set[str] = set()
        self._released: set[str] = set()
        self._memory = OutOfMemoryWatch()

    def start(self, plans: Iterable[ChildPlan]) -> None:
        """Start all, one after the other, without waiting."""
        for plan in plans:
            self.children.append(self._launch(plan))

    def check(self) -> bool:
        """Whether the learner has ended with exit code 0. Raises RoleDied if another process ended.

        The roles that write requests may end before with exit code 0. A worker may end while another one works (see `take_lost`): Kafka
        delivers its unfinished requests again.
        """
        finished = False
        kept = [child for child in self.children if child.plan.name not in self._released]
        # A released worker counts: the coordinator can activate it when the last active one has died.
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
        """Workers that have ended since the last call, with their exit codes, while others work on."""
        new = [lost for name, lost in self._lost.items() if name not in self._told]
        self._told.update(self._lost)
        return new

    def obey(self, released: Set[str]) -> list[str]:
        """End the workers named in `released`, and start a worker again that is not named any more, once its process has ended.

        Returns a line for each change. An ended worker hands its unfinished requests back.
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

    def drain(self, *, patience_s: float, tick: Callable[[], None]) -> list[ChildPlan]:
        """Ask all children to drain and wait, calling `tick`. Kills and returns those that take longer than `patience_s`."""
        for child in self.children:
            child.terminate()
        deadline = Deadline.after(patience_s, self._clock)
        while any(child.poll() is None for child in self.children) and not deadline.expired():
            tick()
        late = [child for child in self.children if child.poll() is None]
        for child in late:
            child.kill()
        for child in self.children:
            # The watcher does not look for a child that was told to end.
            child.plan.announce.unlink(missing_ok=True)
        return [child.plan for child in late]

    def kill(self) -> None:
        """End everything at once. Only who had ended before is announced still, and so missing."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.plan.announce.unlink(missing_ok=True)


def _last_words(log: Path, start: int) -> list[str]:
    """The end of a role's log from byte `start` on, without the hundreds of lines of its Kafka clients about connections."""
    return [line for line in last_lines(log, start) if CLIENT_LOG not in line][-_NUM_SHOWN_LINES:]
