"""Which requests a worker had in hand when it died, so that a request that kills its workers is set aside.

The offset of a request is committed only when its work is done, so a request that ends the process is delivered again, to this worker or
another. The journal is a file of lines on the worker's own disk: `+ partition offset` before a request is worked on, `-` after. A process
that starts under the same worker id reads what its predecessors left open: each such request was in hand when one died. A line is one
`write`, which survives the end of the process, though not of the machine; nothing waits for the disk.

Not every request in hand at a death is the cause. So a request that saw two deaths is worked on alone, and one that saw three is refused.

A worker whose disk takes no journal works on: then the deaths are counted by the notes in the group alone (`in_hand_notes.py`).

Threads: any; a lock keeps lines whole.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from echo_bus.bus import Bus
from echo_bus.client.kafka_errors import translated
from echo_schemas.records import Coordinates

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""A request is refused after so many deaths of workers that had it in hand."""
ALONE_FROM = 2
"""After so many such deaths a request is worked on with no other one in hand."""

# Lines after which the file is written anew with what still counts: a worker that runs for months keeps a file of some hundred kilobytes.
_MOST_LINES = 20_000

_Place = tuple[int, int]
_METADATA_S = 30.0


def journals_folder(bus: Bus, run_id: str) -> Path:
    """The folder of the journals of a run's workers on this machine; another cluster has other records at the same offsets. Raises
    TransportError."""
    with translated(bus.client_id):
        cluster = str(bus.cluster.admin().list_topics(timeout=_METADATA_S).cluster_id or "unnamed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echoswarm"
    return cache / "workers" / cluster / bus.namespace.name / run_id


class CrashJournal:
    """Open one per worker id; `close` it after a drain, which leaves nothing open."""

    def __init__(self, path: Path) -> None:
        """`path` is made if it is not there. Each request that an earlier process left open counts one more death."""
        self._path = path
        self._lock = threading.Lock()
        self._deaths: Counter[_Place] = Counter()
        self._begun: set[_Place] = set()
        self._num_lines = 0
        self._file: BinaryIO | None = None
        try:
            self._deaths = _deaths_of(path)
            self._file = _rewritten(path, self._deaths, self._begun)
        except OSError as exc:
            self._do_without(exc)

    def deaths(self, where: Coordinates) -> int:
        """Deaths of workers under this id that had the request in hand."""
        return self._deaths.get((where.partition, where.offset), 0)

    def begin(self, where: Coordinates) -> None:
        """The request is in hand."""
        with self._lock:
            self._begun.add((where.partition, where.offset))
            self._write(f"+ {where.partition} {where.offset}\n")

    def end(self, where: Coordinates) -> None:
        """The request is done, closed or handed back: no worker died of it."""
        with self._lock:
            self._deaths.pop((where.partition, where.offset), None)
            self._begun.discard((where.partition, where.offset))
            self._write(f"- {where.partition} {where.offset}\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, line: str) -> None:
        """Append under the lock; a file that has grown long is replaced."""
        if self._file is None:
            return
        try:
            self._file.write(line.encode())
            self._num_lines += 1
            if self._num_lines >= _MOST_LINES:
                self._file.close()
                self._file = _rewritten(self._path, self._deaths, self._begun)
                self._num_lines = 0
        except OSError as exc:
            self._do_without(exc)

    def _do_without(self, exc: OSError) -> None:
        """The disk refuses. The file goes, because it would blame requests that are done by now."""
        logger.warning("%s cannot be written (%s); which requests kill their worker is known to the group alone", self._path, exc)
        if self._file is not None:
            self._file.close()
            self._file = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _deaths_of(path: Path) -> Counter[_Place]:
    """Deaths by request, including that of the process that wrote the file last. A torn last line is skipped."""
    deaths: Counter[_Place] = Counter()
    begun: set[_Place] = set()
    if not path.exists():
        return deaths
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        sign, *numbers = line.split()
        if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
            continue
        place = int(numbers[0]), int(numbers[1])
        if sign == "=" and len(numbers) == 3:
            deaths[place] = int(numbers[2])
        elif sign == "+":
            begun.add(place)
        elif sign == "-":
            begun.discard(place)
            deaths.pop(place, None)
    deaths.update(begun)
    return deaths


def _rewritten(path: Path, deaths: Counter[_Place], begun: Iterable[_Place]) -> BinaryIO:
    """Write the journal anew with the counts and the requests in hand; open for further lines, each passed to the system at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    counts = [f"= {partition} {offset} {count}\n" for (partition, offset), count in deaths.items()]
    fresh.write_text("".join([*counts, *(f"+ {partition} {offset}\n" for partition, offset in begun)]), encoding="utf-8")
    fresh.replace(path)
    return path.open("ab", buffering=0)
