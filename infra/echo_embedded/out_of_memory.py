"""Whether the kernel has killed processes because memory ran out, from its counters. A SIGKILL itself does not name its sender."""

from __future__ import annotations

import re
from pathlib import Path

_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


class OutOfMemoryWatch:
    """Remembers the counters at its creation."""

    def __init__(self, control_groups: Path = _CONTROL_GROUPS, own_groups: Path = _OWN_GROUPS, machine: Path = _MACHINE) -> None:
        self._group_files = _group_files(control_groups, own_groups)
        self._machine = machine
        self._group_before, self._machine_before = self._counts()

    def verdict(self) -> str:
        """A sentence about the sender of a SIGKILL."""
        group, machine = self._counts()
        if _has_risen(self._group_before, group):
            return "Its memory limit (control group) was reached: the kernel has killed a process for it since this run began."
        if _has_risen(self._machine_before, machine):
            return "The machine ran out of memory: the kernel has killed a process for it since this run began."
        if group is None and machine is None:
            return "The sender is not known here; `dmesg` shows whether the kernel killed it because memory ran out."
        return "Another process sent it: the kernel has killed no process for lack of memory since this run began."

    def _counts(self) -> tuple[int | None, int | None]:
        found = [count for file in self._group_files if (count := _count(file)) is not None]
        return max(found, default=None), _count(self._machine)


def _group_files(control_groups: Path, own_groups: Path) -> list[Path]:
    """The counter files of this process's control groups and of its container's (versions 2 and 1)."""
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    files = [control_groups / "memory.events", control_groups / "memory" / "memory.oom_control"]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:
            files.append(control_groups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(control_groups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _count(file: Path) -> int | None:
    try:
        found = _COUNTER.search(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else int(found[1])


def _has_risen(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before
