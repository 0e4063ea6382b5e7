"""CPU time of processes, as Linux counts it: user and system seconds, all threads, dead children not included."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# Positions among the fields after the command's name: the parent, user time, system time.
_PARENT, _USER, _SYSTEM = 1, 11, 12


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the process has used; 0 if it does not exist."""
    fields = _fields(pid)
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_A_SECOND if fields else 0.0


def cpu_by_role(pid: int) -> Mapping[str, float]:
    """CPU seconds of an `echoswarm up` and of all processes under it: `supervisor`, `broker`, and each role by its name."""
    found: dict[str, float] = {}
    for process in (pid, *descendants(pid)):
        role = "supervisor" if process == pid else _role_of(process)
        found[role] = found.get(role, 0.0) + cpu_s(process)
    return found


def descendants(pid: int) -> Iterator[int]:
    """The child processes of `pid`, their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            children.setdefault(int(fields[_PARENT]), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    while found:
        process = found.pop()
        yield process
        found += children.get(process, ())


def _role_of(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    if "kafka.Kafka" in command or Path(command[0]).name == "java":
        return "broker"
    return command[command.index("run") + 1] if "run" in command else "other"


def _fields(pid: int) -> list[str]:
    """The fields after the command's name in `/proc/PID/stat`; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []
