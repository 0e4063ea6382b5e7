"""The memory of this machine or container: how much is available, and whether the kernel has killed processes because it ran out."""

from __future__ import annotations

import re
from pathlib import Path

from echo_schemas.errors import UserError

# Resident sizes after a load test; unused heap is not resident.
BROKER_MB = 250
REGISTRY_MB = 200
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_MEMORY_INFO = Path("/proc/meminfo")
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


def available_mb(memory_info: Path = _MEMORY_INFO, control_group: Path = _CONTROL_GROUPS) -> int | None:
    """Megabytes for new processes: the kernel's available memory, or the rest of the container's limit if that is less.

    None if neither can be read (macOS).
    """
    found = []
    if memory_info.is_file() and (match := _AVAILABLE.search(memory_info.read_text())):
        found.append(int(match[1]) // 1024)
    limit, used = control_group / "memory.max", control_group / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        found.append((int(text) - int(used.read_text())) >> 20)
    return min(found, default=None)


def check_memory(num_brokers: int, *, registry: bool, available: int | None) -> None:
    """Raises UserError if `available` megabytes are too few for this cluster."""
    needed = num_brokers * BROKER_MB + (REGISTRY_MB if registry else 0)
    if available is not None and available < needed:
        raise UserError(
            f"The embedded Kafka needs about {needed} MB of memory, and {max(0, available)} MB are available.",
            hint="Close something, start fewer brokers, or point ECHO_KAFKA__BOOTSTRAP at a cluster elsewhere.",
        )


class OutOfMemoryWatch:
    """Remembers the kernel's counters at its creation. A SIGKILL itself does not name its sender."""

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
