"""A run whose every role is a process of its own, to be killed, frozen and doubled; who ends by itself is started again.

One thread owns a swarm. Processes die with it.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from echo_bus.clock import Deadline
from echo_embedded.guard import Guard
from echo_embedded.process import last_lines
from echo_ops.supervisor.child import ProcessChild, how_ended
from echo_ops.supervisor.placement import this_machine
from echo_ops.supervisor.plan import ChildPlan, plan_children
from echo_settings import Settings, load_settings

logger = logging.getLogger(__name__)

CONFIG = Path(__file__).with_name("run.toml")
ENDED_AS_TOLD = frozenset({0, 128 + signal.SIGTERM})
"""Exit codes after SIGTERM: all was done, or [run] drain_s was over first and the rest is the next one's."""
_CLOCK_SHIM = Path(__file__).with_name("clock")
_NUM_SHOWN_LINES = 12
_SECOND = "-second-"


@dataclass(frozen=True)
class Exit:
    """A process that ended without having been told to."""

    name: str
    exit_code: int
    last_words: Sequence[str]

    def __str__(self) -> str:
        return f"{self.name} {how_ended(self.exit_code)}: {self.last_words[-1] if self.last_words else 'no output'}"


@dataclass
class Swarm:
    """The processes of one run. `changes` are settings as environment variables; `inside` puts roles by name behind a command, and
    `releases` has folders with the packages of another release for roles that are started from now on.
    """

    folder: Path
    changes: Mapping[str, str]
    config: Path = CONFIG
    inside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    releases: dict[str, Sequence[Path]] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
        self._children: dict[str, ProcessChild] = {}
        self._guard = Guard()
        self._frozen: set[int] = set()
        self._retired: set[str] = set()
        self._num_seconds = 0
        self._log_starts: dict[str, int] = {}
        self._plan()

    def change(self, changes: Mapping[str, str]) -> None:
        """Other settings for whoever is started from now on; all have ended."""
        assert not any(self.is_running(name) for name in self._plans), "a role of the old settings runs"
        self.changes = {**self.changes, **changes}
        self._plan()
        self._children = {name: child for name, child in self._children.items() if name in self._plans}

    def _plan(self) -> None:
        overrides = {"ECHO_CHECKPOINT__FOLDER": str(self.folder / "run"), **self.changes}
        overrides.setdefault("ECHO_RUN__NAME", "chaos")
        self.settings: Settings = load_settings(self.config, {**self._environ, **overrides})
        plans = plan_children(self.settings, this_machine(), config=self.config, overrides=overrides, folder=self.folder)
        self._plans = {plan.name: plan for plan in plans}

    @property
    def names(self) -> tuple[str, ...]:
        """The processes of the run."""
        return tuple(self._plans)

    @property
    def environ(self) -> dict[str, str]:
        """In which `echoswarm` means this run, and computes as its learner does."""
        own = self._plans["learner"].environ
        return {**own, **self._environ, **{name: value for name, value in own.items() if name.startswith("ECHO_")}}

    def pid(self, name: str) -> int:
        """The process id of a role."""
        return self._children[name].pid

    def announce(self, name: str) -> Path:
        """Where a role's present process says its address, once it answers."""
        return self._plans[name].announce

    def is_running(self, name: str) -> bool:
        """Whether a role's process is there, frozen or not."""
        child = self._children.get(name)
        return child is not None and child.poll() is None

    def start(self, name: str) -> None:
        """Start a role, or start it again."""
        log = self._plans[name].log
        self._log_starts[name] = log.stat().st_size if log.exists() else 0
        self._children[name] = self._launch(self._plans[name])

    def log_start(self, name: str) -> int:
        """Where in its log the role's present process begins."""
        return self._log_starts[name]

    def start_all(self) -> None:
        """Start whoever does not run."""
        for name in self._plans:
            if not self.is_running(name):
                self.start(name)

    def start_second(self, name: str, *arguments: str) -> ProcessChild:
        """Another process of a role beside the first, which nobody starts again."""
        plan = self._plans[name]
        self._num_seconds += 1
        second = f"{name}{_SECOND}{self._num_seconds}"
        announce = plan.announce.with_name(f"{second}.json")
        command = [str(announce) if part == str(plan.announce) else part for part in plan.command]
        return self._launch(
            replace(plan, name=second, command=(*command, *arguments), log=plan.log.with_name(f"{second}.log"), announce=announce)
        )

    def adopt(self, name: str, child: ProcessChild) -> None:
        """From now on `child` is the role's process; the one before has ended."""
        self._children[name] = child

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        self._frozen.discard(self.pid(name))
        self._children[name].kill()

    def freeze(self, child: ProcessChild) -> None:
        """SIGSTOP."""
        self._frozen.add(child.pid)
        os.kill(child.pid, signal.SIGSTOP)

    def thaw(self, child: ProcessChild) -> None:
        """SIGCONT; whoever has ended stays so."""
        if child.pid in self._frozen and child.poll() is None:
            os.kill(child.pid, signal.SIGCONT)
        self._frozen.discard(child.pid)

    def wait_ended(self, child: ProcessChild, deadline: Deadline, pause: Callable[[float], object]) -> int:
        """The exit code of a process that is about to end."""
        while (code := child.poll()) is None:
            assert not deadline.expired(), f"waited for the end of {child.plan.name}; its log: {child.plan.log}"
            pause(0.02)
        return code

    def child(self, name: str) -> ProcessChild:
        """The process of a role."""
        return self._children[name]

    def tend(self) -> list[Exit]:
        """Start again whoever ended by itself, as any supervisor would; tells of those."""
        found = []
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is not None and name in self._plans and name not in self._retired:
                found.append(Exit(name, code, last_lines(child.plan.log, count=_NUM_SHOWN_LINES)))
                self.start(name)
        self.exits += found
        return found

    def step_clock(self, name: str, seconds: float) -> None:
        """Move the wall clock that a role's Python code sees."""
        # In place: the process has the file mapped.
        with self._clock(name).open("r+b") as file:
            file.write(struct.pack("<q", int(seconds * 1e9)))

    def retire(self, name: str) -> None:
        """SIGTERM to a role that is not needed any more: nobody starts it again."""
        self._retired.add(name)
        self._children[name].terminate()

    def terminate_all(self) -> None:
        """SIGTERM to everybody at once."""
        for child in self._children.values():
            child.terminate()

    def close(self) -> None:
        """End everything at once."""
        for child in self._children.values():
            child.kill()
        self._guard.close()

    def _clock(self, name: str) -> Path:
        return self.folder / "clocks" / name

    def _launch(self, plan: ChildPlan) -> ProcessChild:
        clock = self._clock(plan.name.partition(_SECOND)[0])
        if not clock.exists():
            clock.parent.mkdir(parents=True, exist_ok=True)
            clock.write_bytes(bytes(8))
        path = os.pathsep.join(
            filter(None, (str(_CLOCK_SHIM), *map(str, self.releases.get(plan.name, ())), self._environ.get("PYTHONPATH")))
        )
        environ = {**self._environ, "CHAOS_CLOCK": str(clock), "PYTHONPATH": path}
        inside = self.inside.get(plan.name, ())
        return ProcessChild(replace(plan, command=(*inside, *plan.command)), self._guard, environ)


def said_by(child: ProcessChild) -> str:
    """What a process has written."""
    return child.plan.log.read_text(encoding="utf-8", errors="replace") if child.plan.log.exists() else ""
