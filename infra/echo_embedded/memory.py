"""The available memory of this machine or container."""

from __future__ import annotations

import re
from pathlib import Path

from echo_schemas.errors import UserError

# Resident sizes after a load test; unused heap is not resident.
BROKER_MB = 250
REGISTRY_MB = 200
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_MEMORY_INFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_mb(memory_info: Path = _MEMORY_INFO, control_group: Path = _CONTROL_GROUP) -> int | None:
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
