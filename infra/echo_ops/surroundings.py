"""Questions of several commands to this machine and to the registry."""

from __future__ import annotations

import os
import time
from pathlib import Path

from echo_schemas.naming import Namespace
from echo_settings import Settings

# Index in /proc/self/stat behind the command's name, which may hold spaces.
_STARTTIME = 19


def existing_part(folder: Path) -> Path:
    """`folder`, or the nearest existing one above it."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ask_registry(settings: Settings) -> None:
    """Raise UserError or TransportError if the registry of the settings does not know our schemas, or does not answer."""
    from echo_schemas.registry import HttpRegistry, subjects_of
    from echo_schemas.schemas import newest

    subjects = subjects_of(Namespace(settings.kafka.namespace).topic)
    HttpRegistry(settings.registry.url, subjects, settings.registry.client_properties()).id_of(newest("trajectory"))


def process_age_s() -> float:
    """Seconds since this process was started: a run's seconds count from the command, not from the end of the imports. 0 if the system
    does not say (not Linux)."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        started_ticks = int(stat.rpartition(")")[2].split()[_STARTTIME])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
