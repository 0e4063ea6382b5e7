"""One JVM as a child process: its command, its log file, and why it died."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TextIO

from echo_bus.clock import Deadline
from echo_bus.errors import TransportError
from echo_embedded.guard import Guard
from echo_embedded.memory import OutOfMemoryWatch

_NUM_SHOWN_LINES = 12
# A stack trace can be long, and its cause stands above it.
_NUM_SEARCHED_LINES = 400
# Popen warns when it is deleted while its process runs; these processes outlive us on purpose.
_outliving: list[subprocess.Popen[bytes]] = []


@atexit.register
def _leave_running() -> None:
    for popen in _outliving:
        popen.returncode = popen.poll() or 0


class DeathCause(Enum):
    """Why a JVM ended: the text that completes "It ended: …", a hint, and the messages of the JVM or of Kafka that show this cause."""

    PORT_TAKEN = "its port is taken", "Stop what listens there, or let the ports be chosen.", "Address already in use"
    FOLDER_IN_USE = "another broker runs on its data folder", "Stop that broker, or name another folder.", "Failed to acquire lock on file"
    FOREIGN_DATA = "its data folder belongs to another cluster", "Name another folder.", "Invalid cluster.id"
    DISK_FULL = "the disk is full", "Free some space, or name a folder on another disk.", "No space left on device"
    OLD_JAVA = (
        "the Java runtime is too old for it",
        "Install a new runtime with: pip install 'echoswarm[embedded]'.",
        "UnsupportedClassVersionError",
    )
    NO_MEMORY = (
        "the machine has not enough memory",
        "Close something, or ask for a smaller heap.",
        *("Could not reserve enough space", "insufficient memory for the Java Runtime", "unable to create native thread"),
    )
    SMALL_HEAP = "its heap is too small", "Ask for a larger heap.", "OutOfMemoryError"
    KILLED = "it was killed", ""
    UNKNOWN = "the reason is in its log", ""

    def __init__(self, text: str, hint: str, *messages: str) -> None:
        self.text, self.hint, self.messages = text, hint, messages


class ProcessDied(TransportError):
    """A JVM of the embedded cluster has ended; the message ends with its last log lines. `killed_by`: a sentence on who sent a SIGKILL."""

    def __init__(self, name: str, return_code: int, lines: Sequence[str], killed_by: str = "") -> None:
        self.cause = cause_of_death(return_code, lines)
        message = f"{name} ended with exit code {return_code}: {self.cause.text}."
        shown = [line for line in lines if not line.startswith("\tat ")][-_NUM_SHOWN_LINES:]
        if shown:
            message += " Its last log lines:\n" + "\n".join(f"  {line}" for line in shown) + "\n"
        super().__init__(message, hint=killed_by if self.cause is DeathCause.KILLED else self.cause.hint)


class JavaProcess:
    """A JVM that writes to a log file. One owner thread; not thread-safe.

    `name`: its name in messages; `folder`: its working folder. It inherits the open file `lock` and so holds that lock while it runs.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, *, lock: TextIO, folder: Path | None = None) -> None:
        self.name = name
        self.log = log
        self.command = tuple(command)
        self.folder = folder
        self._lock = lock
        self._popen: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._log_start = 0
        self._memory = OutOfMemoryWatch()

    @property
    def pid(self) -> int:
        """The process id. Raises TransportError if it was never started."""
        return self._started().pid

    def start(self, guard: Guard | None) -> None:
        """Start it; returns before it is ready. With a `guard` it ends with this process, else it outlives this process."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # glibc's default of eight arenas per core costs a JVM tens of MB of resident memory.
        environ = {**os.environ, "MALLOC_ARENA_MAX": "2"}
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environ,
                # Ctrl-C must not reach the broker: its owner decides when it stops.
                start_new_session=True,
                pass_fds=[self._lock.fileno()],
            )
        self._guard = guard
        if guard is None:
            _outliving.append(self._popen)
        else:
            guard.protect(self._popen.pid)

    def is_running(self) -> bool:
        """Whether the process exists now, suspended or not."""
        return self._popen is not None and self._popen.poll() is None

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM); returns at once. Does nothing if it has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it (SIGKILL), and reap it."""
        self._send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
            self._release()

    def suspend(self) -> None:
        """Freeze it (SIGSTOP): its sockets stay open, and it does not answer."""
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
        self._release()
        return True

    def check_alive(self) -> None:
        """Raises ProcessDied if it has ended."""
        if not self.is_running():
            self._release()
            raise ProcessDied(self.name, self._started().returncode, last_lines(self.log, self._log_start), self._memory.verdict())

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise TransportError(f"{self.name} was never started.")
        return self._popen

    def _send(self, number: signal.Signals) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.send_signal(number)

    def _release(self) -> None:
        if self._guard is not None:
            self._guard.release(self._started().pid)
            self._guard = None


def last_lines(log: Path, start: int = 0, count: int = _NUM_SEARCHED_LINES) -> list[str]:
    """The last `count` lines of a log file, none from before byte `start`; empty if it does not exist."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(start)
        return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=count)]


def cause_of_death(return_code: int, lines: Sequence[str]) -> DeathCause:
    """The cause of a JVM's end, from its exit code and last log lines."""
    for cause in DeathCause:
        if any(message in line for line in lines for message in cause.messages):
            return cause
    return DeathCause.KILLED if return_code == -signal.SIGKILL else DeathCause.UNKNOWN
