"""Ends JVMs whose owner died: a small process that outlives its parent by a second.

The parent starts `python guard.py` and writes `+<pid>` and `-<pid>` lines to its standard input as JVMs start and end. When the pipe
closes, or the parent is gone although a forked sibling still holds the pipe, the guard kills every pid on the list. It uses the standard
library only and runs as a file, because importing the package would cost time and memory.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

_CHECK_PARENT_S = 1.0


class Guard:
    """The parent's side. One owner thread. `close` kills the processes that were not released."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        # Its own process group, so that Ctrl-C reaches the owner only. No output, so that it does not hold the owner's pipes open.
        quiet = subprocess.DEVNULL
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0)

    def protect(self, pid: int) -> None:
        """End `pid` when this process dies."""
        self._write(f"+{pid}\n")

    def release(self, pid: int) -> None:
        """Forget `pid`. Call it when the process has been reaped, because its id may be reused."""
        self._write(f"-{pid}\n")

    def close(self) -> None:
        """Kill the protected processes, and end the guard."""
        stdin = self._popen.stdin
        if stdin is not None and not stdin.closed:
            with suppress(BrokenPipeError):
                stdin.close()
        self._popen.wait()

    def _write(self, line: str) -> None:
        stdin = self._popen.stdin
        if stdin is not None and not stdin.closed:
            # A killed guard protects nothing, but must not end its owner.
            with suppress(BrokenPipeError):
                stdin.write(line.encode())
                stdin.flush()


def watch(parent: int) -> None:
    """The guard's loop: blocks until the parent is gone, then kills the processes on the list."""
    protected: set[int] = set()
    buffered = b""
    gone = False
    while True:
        gone = gone or os.getppid() != parent
        # Read all that the parent wrote before it died, even if it died before this process started.
        readable, _, _ = select.select([0], [], [], 0.0 if gone else _CHECK_PARENT_S)
        chunk = os.read(0, 4096) if readable else b""
        if not chunk and (readable or gone):
            break
        *lines, buffered = (buffered + chunk).split(b"\n")
        _apply(lines, protected)
    for pid in protected:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _apply(lines: Iterable[bytes], protected: set[int]) -> None:
    for line in lines:
        if line.startswith(b"+"):
            protected.add(int(line[1:]))
        else:
            protected.discard(int(line[1:]))


if __name__ == "__main__":
    watch(int(sys.argv[1]))
