"""How long ago this process was started: a run's seconds count from the command, not from the end of the imports."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Index in /proc/self/stat behind the command's name, which may hold spaces.
_STARTTIME = 19


def process_age_s() -> float:
    """Seconds since this process was started; 0 if the system does not say (not Linux)."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        started_ticks = int(stat.rpartition(")")[2].split()[_STARTTIME])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
