"""What the kernel keeps for nobody: mounts and networks, undone when their maker is gone, however it went."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

_UNDO_S = 20.0


class Undo:
    """Commands that a shell of its own runs when `run` is called, or when this process has died; each whatever becomes of the others."""

    def __init__(self, *commands: Sequence[str]) -> None:
        # The shell reads until the pipe closes, which nobody but this process holds open.
        script = "; ".join(["read -r _", *map(shlex.join, commands)])
        quiet = subprocess.DEVNULL
        self._shell = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0, cwd="/")

    def run(self) -> None:
        """Now. Idempotent."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(_UNDO_S)
