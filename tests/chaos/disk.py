"""A small disk of its own under the run's folder, to be filled. Needs root, and a kernel that mounts tmpfs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.undo import Undo

_MOUNT_S = 20.0
_BLOCK = 65_536


class SmallDisk:
    """`size_mb` of memory, mounted at `folder`."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self._folder = folder
        self._size_mb = size_mb
        self._ballast = folder / "ballast"

    @staticmethod
    def why_not(folder: Path) -> str | None:
        """Why no disk can be mounted below `folder`; None if it can."""
        if os.geteuid() != 0:
            return "mounting a small disk needs root"
        probe = folder / "probe"
        try:
            with SmallDisk(probe, 1):
                return None
        except (OSError, subprocess.SubprocessError) as exc:
            return f"this kernel or container mounts no tmpfs: {exc}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Lazily: whoever still has a file open there keeps it until it ends.
        self._undo = Undo(("umount", "--lazy", str(self._folder)))
        try:
            self._mount()
        except BaseException:  # there is nothing to undo, but a shell that waits
            self._undo.run()
            raise
        return self

    def _mount(self) -> None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self._size_mb}m", "echoswarm-chaos", str(self._folder)],
            check=True,
            capture_output=True,
            timeout=_MOUNT_S,
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.run()

    def fill(self) -> None:
        """Leave nothing free."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (_BLOCK, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Give the space back."""
        self._ballast.unlink(missing_ok=True)
