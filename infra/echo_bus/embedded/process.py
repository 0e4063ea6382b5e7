"""One JVM as a child process: its command, its log file, and why it died."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from echo_bus.clock import Deadline
from echo_bus.errors import TransportError

_NUM_SHOWN_LINES = 12
# A stack trace can be long; its cause is said above it.
_NUM_SEARCHED_LINES = 400
# Said by the JVM or by Kafka in their own words; the first match explains the death.
_CAUSES = (
    ("Address already in use", "its port is taken", "Stop what listens there, or let the ports be chosen."),
    (
        "Failed to acquire lock on file",
        "another broker runs on its data folder",
        "Stop that broker, or name another folder.",
    ),
    ("Invalid cluster.id", "its data folder belongs to another cluster", "Name another folder."),
    ("No space left on device", "the disk is full", "Free some space, or name a folder on another disk."),
    (
        "UnsupportedClassVersionError",
        "the Java runtime is too old for it",
        "pip install 'echoswarm[embedded]' brings a new one.",
    ),
    ("Could not reserve enough space", "there is not enough memory", "Close something, or pass a smaller heap_mb."),
    (
        "insufficient memory for the Java Runtime",
        "there is not enough memory",
        "Close something, or pass a smaller heap_mb.",
    ),
    ("OutOfMemoryError", "its heap is too small", "Pass a larger heap_mb."),
)


class JavaProcess:
    """A JVM that writes to a log file. One owner thread; not thread-safe.

    `name` is how messages call it. With `detached` it is in a session of its own and outlives this process.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, *, folder: Path | None = None) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._folder = folder
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id. Raises TransportError if it was never started."""
        return self._started().pid

    def start(self, *, detached: bool = False) -> None:
        """Start it; returns before it is ready."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Two arenas instead of eight per core: a JVM's native allocations need no more, and the resident set shrinks by tens of MB.
        environ = {**os.environ, "MALLOC_ARENA_MAX": "2"}
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=environ,
                # Ctrl-C in a terminal reaches the whole foreground group; the parent decides when its broker stops.
                start_new_session=detached,
                process_group=None if detached else 0,
            )

    def is_running(self) -> bool:
        """Whether the process exists now, suspended or not."""
        return self._popen is not None and self._popen.poll() is None

    def terminate(self) -> None:
        """Ask it to stop; returns at once. A process that has ended is left alone."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a chance to clean up (kill -9), and reap it."""
        self._send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()

    def suspend(self) -> None:
        """Freeze it (SIGSTOP): its sockets stay open and nothing answers."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a suspended process go on (SIGCONT)."""
        self._send(signal.SIGCONT)

    def wait(self, deadline: Deadline) -> bool:
        """Wait for its end; False if it still runs at the deadline."""
        try:
            self._started().wait(timeout=deadline.remaining_s())
        except subprocess.TimeoutExpired:
            return False
        return True

    def check_alive(self) -> None:
        """Raises TransportError, with its last log lines and a known cause, if it has ended."""
        if not self.is_running():
            message, hint = explain(self.name, self._started().returncode, last_lines(self.log))
            raise TransportError(message, hint=hint)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise TransportError(f"{self.name} was never started.")
        return self._popen

    def _send(self, number: signal.Signals) -> None:
        if self.is_running():
            self._started().send_signal(number)


def last_lines(log: Path, count: int = _NUM_SEARCHED_LINES) -> list[str]:
    """The last lines of a log file; none if it does not exist."""
    if not log.is_file():
        return []
    with log.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, maxlen=count)]


def explain(name: str, return_code: int, lines: Sequence[str]) -> tuple[str, str]:
    """A sentence that says why a JVM ended, and what to do, from its exit code and its last log lines."""
    cause, hint = "", ""
    for needle, known_cause, known_hint in _CAUSES:
        if any(needle in line for line in lines):
            cause, hint = known_cause, known_hint
            break
    else:
        if return_code == -signal.SIGKILL:
            cause, hint = "it was killed", "If nobody did it by hand, the machine ran out of memory."
    message = f"{name} ended with exit code {return_code}" + (f": {cause}." if cause else ".")
    shown = [line for line in lines if not line.startswith("\tat ")][-_NUM_SHOWN_LINES:]
    if shown:
        message += " Its last log lines:\n" + "\n".join(f"  {line}" for line in shown) + "\n"
    return message, hint
