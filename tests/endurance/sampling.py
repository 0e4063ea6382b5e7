"""What processes hold, and what lies on disks, now. Of Linux: /proc."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

_MIB = 1 << 20
_KIB_IN_MIB = 1 << 10
_SCRAPE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """By a process and its children together: memory of their own, open files, threads, and the series of /metrics (None: it did not
    answer)."""

    memory_mb: float
    files: int
    threads: int
    series: frozenset[str] | None


def held_by(pid: int, url: str) -> Held:
    """`url`: where /metrics is below. A child that ends meanwhile is passed over; raises OSError if the process itself has ended."""
    memory_kb = files = threads = 0
    for number, each in enumerate(_family(pid)):
        try:
            status = dict(line.split(":", 1) for line in (each / "status").read_text(encoding="utf-8").splitlines())
            # What a file backs is the kernel's to take back; what is swapped out is still held.
            memory_kb += sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap"))
            threads += int(status["Threads"])
            files += sum(1 for _ in (each / "fd").iterdir())
        except (OSError, KeyError):
            if number == 0:
                raise ProcessLookupError(f"process {pid} has ended") from None
    return Held(memory_mb=memory_kb / _KIB_IN_MIB, files=files, threads=threads, series=_series(url))


def bytes_below(folder: Path, suffix: str = "") -> int:
    """Of all files there whose name ends so, once each; what is removed meanwhile is passed over."""
    seen: dict[int, int] = {}
    for below, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = (Path(below) / name).lstat()
                seen[found.st_ino] = found.st_size if name.endswith(suffix) else 0
    return sum(seen.values())


def megabytes(num_bytes: int) -> float:
    """MiB."""
    return num_bytes / _MIB


def _family(pid: int) -> Iterator[Path]:
    folder = Path("/proc") / str(pid)
    yield folder
    with suppress(OSError):
        for task in (folder / "task").iterdir():
            for child in (task / "children").read_text(encoding="utf-8").split():
                yield from _family(int(child))


def _series(url: str) -> frozenset[str] | None:
    with suppress(OSError, HTTPException), urllib.request.urlopen(f"{url}/metrics", timeout=_SCRAPE_S) as answer:
        return frozenset(line.rpartition(" ")[0] for line in answer.read().decode().splitlines() if not line.startswith("#"))
    return None
