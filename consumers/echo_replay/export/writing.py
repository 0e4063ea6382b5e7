"""Writes the files of an export on a second thread, while the caller's thread makes the next rows. Imports pyarrow.

Encoding, compressing and waiting for the disk release the interpreter's lock. Threads: the caller's calls everything here; the second one
runs the methods of the files, in the order of the calls. At most `_AHEAD` tables wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from echo_replay.export.layout import Slot
from echo_replay.export.manifest import ExportedFile
from echo_replay.export.table_file import StagedFile

# As many tables as the caller makes while a group of rows is encoded; each has some megabytes.
_AHEAD = 4


class Writing:
    """A context manager: at its end, also after a failure, it removes unfinished files."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._ahead: deque[Future[ExportedFile | None]] = deque()
        self._open: dict[Slot, StagedFile] = {}
        self._finished: list[ExportedFile] = []

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        for file in self._open.values():
            file.abandon()

    def begin(self, slot: Slot, schema: Any) -> StagedFile:
        """The new file of a slot. Raises OSError."""
        self._open[slot] = file = StagedFile(self._home, slot, schema)
        return file

    def write(self, file: StagedFile, table: Any, num_unsettled: int = 0) -> None:
        """Append rows. Raises the error of an earlier call: OSError."""
        self._ask(file.write, table, num_unsettled)

    def finish(self, file: StagedFile) -> None:
        """Ask to complete the file; `finished` returns it then. Raises as `write`."""
        self._ask(file.finish)

    def finished(self) -> list[ExportedFile]:
        """Wait for all calls; return the newly finished files. Raises as `write`."""
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
