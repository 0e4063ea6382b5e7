"""The user's own questions: a JSONL or Parquet file as rows, each with a question and an answer. Imports pyarrow for Parquet alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_schemas.errors import UserError
from echo_schemas.libraries import TASKS, require_libraries
from echo_tasks.options import nearest

_JSONL = frozenset({".jsonl", ".ndjson", ".json"})
_PARQUET = frozenset({".parquet", ".pq"})


@dataclass(frozen=True, slots=True)
class Row:
    """One record. `place` is how messages name it: `row 7 of questions.jsonl`."""

    place: str
    fields: Mapping[str, Any]

    def text(self, wanted: Sequence[str]) -> tuple[str, str]:
        """The first field of `wanted`, upper or lower case, and its text; a number is turned into text.

        Raises UserError if there is none, or it is empty.
        """
        by_name = {name.lower(): name for name in self.fields}
        for name in wanted:
            found = by_name.get(name.lower())
            if found is None:
                continue
            value = self.fields[found]
            text = value.strip() if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
            if not text:
                raise UserError(f"The field {found!r} in {self.place} is empty or no text: {value!r}.", hint="Mend the row, or remove it.")
            return found, text
        raise UserError(
            f"There is no field {' or '.join(repr(name) for name in wanted)} in {self.place}.",
            hint=f"{nearest(wanted[0], list(self.fields))} Name it with question_field or answer_field in [task.options].",
        )


def read_rows(path: str, task: str) -> list[Row]:
    """All rows of the file, in order. Raises UserError if it is missing, of another kind, not readable, or empty."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"There is no file {path} for the task {task!r}.", hint=_what_is_there(file))
    if file.suffix in _JSONL:
        rows = list(_jsonl_rows(file))
    elif file.suffix in _PARQUET:
        require_libraries(f"The task {task!r}", "pyarrow", install=TASKS)
        rows = list(_parquet_rows(file))
    else:
        raise UserError(f"{path} is neither JSONL nor Parquet by its name.", hint="Name it *.jsonl or *.parquet.")
    if not rows:
        raise UserError(f"{path} is empty: there is nothing to ask.", hint='Write one record a line, such as {"question": …, "answer": …}.')
    return rows


def _what_is_there(file: Path) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"There is no folder {folder} either; relative paths count from the folder that the run is started in."
    return nearest(file.name, sorted(other.name for other in folder.iterdir() if other.suffix in _JSONL | _PARQUET) or ["no such files"])


def _jsonl_rows(file: Path) -> Iterator[Row]:
    try:
        lines: Iterable[str] = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise UserError(f"{file} cannot be read: {exc}.") from exc
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"row {number} of {file.name}"
        try:
            fields = json.loads(line)
        except ValueError as exc:
            raise UserError(f"There is no JSON in {place}: {exc}.", hint="JSONL has one whole object a line.") from exc
        if not isinstance(fields, dict):
            raise UserError(f"There is no object in {place} but {type(fields).__name__}.", hint="JSONL has one whole object a line.")
        yield Row(place, fields)


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as exc:
        raise UserError(f"{file} cannot be read as Parquet: {exc}.") from exc
    for number, fields in enumerate(table.to_pylist(), 1):
        yield Row(f"row {number} of {file.name}", fields)
