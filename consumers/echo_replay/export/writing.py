"""The files of an export that are under way: written on a thread of their own, while the caller's makes their next rows. Imports pyarrow.

Encoding and compressing leave the interpreter free, and so does waiting for a disk. Threads: everything here is called by the caller's; the
methods of the files run on the other one, in the order in which they were asked for. At most `_AHEAD` tables wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from echo_replay.export.layout import Slot
from echo_replay.export.manifest import ExportedFile
from echo_replay.export.table_file import StagedFile

# As many as are made while a group of rows is encoded; each is some megabytes.
_AHEAD = 4


class Writing:
    """A context manager: at its end, whatever ends it, nothing half-written stays."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._ahead: deque[Future[ExportedFile | None]] = deque()
        self._open: dict[Slot, StagedFile] = {}
        self._finished: list[ExportedFile] = []

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)
        for file in self._open.values():
            file.abandon()

    def begin(self, slot: Slot, schema: Any) -> StagedFile:
        """The new file of a slot. Raises OSError."""
        self._open[slot] = file = StagedFile(self._home, slot, schema)
        return file

    def write(self, file: StagedFile, table: Any, num_unsettled: int = 0) -> None:
        """Append rows. Raises what an earlier call has raised: OSError."""
        self._ask(file.write, table, num_unsettled)

    def finish(self, file: StagedFile) -> None:
        """The file is whole soon: then `finished` tells of it. Raises as `write`."""
        self._ask(file.finish)

    def finished(self) -> list[ExportedFile]:
        """The files that were finished since the last time, once all that was asked for is done. Raises as `write`."""
        while self._ahead:
            self._wait()
        finished, self._finished = self._finished, []
        return finished

    def _ask(self, call: Callable[..., ExportedFile | None], *arguments: Any) -> None:
        while len(self._ahead) >= _AHEAD:
            self._wait()
        self._ahead.append(self._thread.submit(call, *arguments))

    def _wait(self) -> None:
        """Until the oldest call is done."""
        if (file := self._ahead.popleft().result()) is not None:
            self._finished.append(file)
            del self._open[file.slot]
