"""Questions in SQL about an export, or about one range of the log, as in `echoswarm sql`; one at a time, each with a time limit.

The server's threads call this; a call blocks up to the time limit. The first question imports DuckDB and Arrow.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_bus.clock import Deadline
from echo_ops.harmless import harmless
from echo_ops.viewer.searches import TooMany
from echo_ops.viewer.windows import Json
from echo_replay.history import History
from echo_replay.near import read_near
from echo_replay.selection import Selection
from echo_schemas.libraries import ANALYSIS, require_libraries

if TYPE_CHECKING:
    from echo_replay.export.queries import Answer

MOST_ROWS = 500
# Most trajectories of the log for one question; use an export for more.
_MOST_TRAJECTORIES = 20_000
# Time limits for reading the log, and for the answer.
_READING_S, _TIMEOUT_S = 20.0, 20.0
_MOST_CELL = 600
_MOST_MB = 1_024


class Questions:
    """The questions of one viewer. `export`: a folder of `echoswarm export`; without it questions go to the log."""

    def __init__(self, run_id: str, export: Path | None = None) -> None:
        self._run_id, self.export = run_id, export
        self._turn = threading.Lock()

    def ask(self, question: str, selection: Selection, limit: int, reading: Callable[[], AbstractContextManager[History]]) -> Json:
        """The answer. Raises UserError for a question that is invalid, not allowed, too large or too slow; TooMany, TransportError."""
        require_libraries("A question in SQL", "pyarrow", "duckdb", install=ANALYSIS)
        if not self._turn.acquire(blocking=False):
            raise TooMany("Another question is being answered.", hint="Wait for it, or until it has taken too long.")
        try:
            if self.export is not None:
                from echo_replay.export.manifest import open_export
                from echo_replay.export.queries import ask

                home, manifest = open_export(self.export, self._run_id)
                return _plain(ask(home, manifest, question, timeout_s=_TIMEOUT_S, limit=limit, most_mb=_MOST_MB), [])
            return self._ask_the_log(question, selection, limit, reading)
        finally:
            self._turn.release()

    def _ask_the_log(
        self, question: str, selection: Selection, limit: int, reading: Callable[[], AbstractContextManager[History]]
    ) -> Json:  # fmt: skip
        from echo_replay.export.bounded import folder_of_part, load_part
        from echo_replay.export.queries import ask, check_question

        check_question(question)
        with folder_of_part() as folder:
            with reading() as history:
                records = read_near(history, selection)
                manifest = load_part(history, records, _MOST_TRAJECTORIES, folder, Deadline.after(_READING_S))
                missing = list(history.missing)
            return _plain(ask(folder, manifest, question, timeout_s=_TIMEOUT_S, limit=limit, most_mb=_MOST_MB), missing)


def _plain(answer: Answer, missing: list[str]) -> Json:
    return {
        "columns": [harmless(column) for column in answer.columns],
        "rows": [[_cell(value) for value in row] for row in answer.rows],
        "is_cut": answer.is_cut,
        "missing": missing,
    }


def _cell(value: Any) -> str | float | int | bool | None:
    """A value for JSON; of long values, lists and structs the beginning as text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) and abs(value) < 1 << 53 else str(value)
    text = "".join(itertools.islice(_words(value), _MOST_CELL))
    return harmless(text[:_MOST_CELL] + ("…" if len(text) >= _MOST_CELL else ""), keep_lines=True)


def _words(value: Any) -> Iterator[str]:
    """The text of a value in pieces, because an answer may hold a list of a million tokens and only its beginning is shown."""
    if isinstance(value, list):
        yield "["
        for number, each in enumerate(value):
            yield ", " if number else ""
            yield str(each)
        yield "]"
    else:
        yield str(value)[: _MOST_CELL + 1]
