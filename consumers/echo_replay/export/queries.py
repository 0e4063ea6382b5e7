"""SQL over the files of an export, by DuckDB: six tables and the view `groups`. Imports duckdb.

A question can read the files that the manifest names and nothing else: one SELECT, no other files, no network, no settings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from echo_replay.export.columns import REWARD_PREFIX, SCHEMAS, schema_of
from echo_replay.export.layout import Table
from echo_replay.export.manifest import ExportManifest
from echo_schemas.errors import UserError

_TABLES = ", ".join([*(table.value for table in Table), "groups"])
_ASK_SELECT = "Write one SELECT; `describe trajectories` and `show tables` are answered too."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`rows` in order. `is_cut`: there are more than were asked for."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool


def ask(home: Path, manifest: ExportManifest, question: str, *, timeout_s: float, limit: int, most_mb: int | None = None) -> Answer:
    """The first `limit` rows of the answer (0: all). `most_mb`: its memory; None: DuckDB's default, most of the machine's. Raises UserError
    for a question that is invalid, reads other files, or takes too long or too much memory."""
    with _opened(home, manifest, most_mb) as connection:
        _refuse_all_but_select(connection, question)
        timer = threading.Timer(timeout_s, connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            result = connection.execute(question)
            columns = tuple(str(column[0]) for column in result.description)
            rows = result.fetchmany(limit + 1) if limit else result.fetchall()
        except duckdb.InterruptException:
            raise UserError(
                f"The question was not answered within {timeout_s:g} s.",
                hint="Ask for less: fewer columns, a WHERE; `echoswarm sql --timeout` gives it longer.",
            ) from None
        except duckdb.PermissionException as exc:
            raise UserError(f"The question names a file: {_first_line(exc)}", hint=f"It may read {_TABLES}, and nothing else.") from exc
        except duckdb.OutOfMemoryException as exc:
            raise UserError("The answer does not fit into memory.", hint="Ask for fewer columns, or aggregate before you sort.") from exc
        except duckdb.Error as exc:
            raise UserError(_first_line(exc), hint=f"The tables are {_TABLES}; `describe trajectories` shows columns.") from exc
        finally:
            timer.cancel()
    return Answer(columns=columns, rows=rows[:limit] if limit else rows, is_cut=bool(limit) and len(rows) > limit)


def check_question(question: str) -> None:
    """Check a question before any data is read. Raises UserError unless it is a single SELECT."""
    with duckdb.connect(":memory:") as connection:
        _refuse_all_but_select(connection, question)


@contextmanager
def _opened(home: Path, manifest: ExportManifest, most_mb: int | None) -> Iterator[Any]:
    paths = {table: [str((home / file.path).resolve()) for file in manifest.files if file.slot.table is table] for table in Table}
    with duckdb.connect(":memory:") as connection:
        try:
            for table, mine in paths.items():
                _add_table(connection, table, mine, manifest.reward_names)
            connection.execute(_groups_sql(manifest.reward_names))
        except duckdb.Error as exc:
            raise UserError(
                f"The export cannot be read ({_first_line(exc)})", hint="`echoswarm export --verify` says which file is not whole."
            ) from exc
        everything = [path for mine in paths.values() for path in mine]
        connection.execute(f"SET allowed_paths = {_list(everything)}")
        # Refuse an answer that does not fit into memory: no rows are spilled to a folder.
        connection.execute("SET temp_directory = ''")
        if most_mb is not None:
            connection.execute(f"SET memory_limit = '{most_mb}MB'")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection


def _refuse_all_but_select(connection: Any, question: str) -> None:
    try:
        statements = connection.extract_statements(question)
    except duckdb.Error as exc:
        raise UserError(_first_line(exc), hint=_ASK_SELECT) from exc
    if len(statements) != 1:
        raise UserError(f"{len(statements)} statements were given; one is answered.", hint=_ASK_SELECT)
    if statements[0].type != duckdb.StatementType.SELECT:
        raise UserError(f"A question may only read, and {statements[0].type.name} is no SELECT.", hint=_ASK_SELECT)


def _add_table(connection: Any, table: Table, paths: list[str], reward_names: tuple[str, ...]) -> None:
    if paths:
        # Files written at different times have columns of different rewards.
        files = f"read_parquet({_list(paths)}, union_by_name = true, hive_partitioning = false)"
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {files}")  # noqa: S608  quoted
        return
    schema = schema_of(reward_names) if table is Table.TRAJECTORIES else SCHEMAS[table]
    connection.register("nothing", schema.empty_table())
    connection.execute(f"CREATE TABLE {table} AS SELECT * FROM nothing")  # noqa: S608  the name is one of ours
    connection.unregister("nothing")


def _groups_sql(reward_names: tuple[str, ...]) -> str:
    """One row for each attempt at a group, with the moments of each reward."""
    moments = "".join(
        f", {function}({_name(REWARD_PREFIX + name)}) AS {_name(f'{REWARD_PREFIX}{name}_{said}')}"
        for name in reward_names
        for function, said in (("avg", "mean"), ("stddev_samp", "std"), ("min", "min"), ("max", "max"))
    )
    return f"""
        CREATE VIEW groups AS
        SELECT group_id, attempt, any_value(seq) AS seq, any_value(purpose) AS purpose, any_value(task) AS task,
               any_value(prompt) AS prompt, any_value(group_size) AS group_size, count(*) AS num_samples, count(step) AS num_trained,
               count(*) FILTER (fate = 'dropped') AS num_dropped, max(step) AS step, min(min_version) AS min_version,
               max(max_version) AS max_version, sum(num_generated) AS num_generated{moments}
        FROM trajectories WHERE group_id IS NOT NULL GROUP BY group_id, attempt
    """  # noqa: S608  names are quoted


def _list(texts: list[str]) -> str:
    return "[" + ", ".join("'" + text.replace("'", "''") + "'" for text in texts) + "]"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _first_line(exc: Exception) -> str:
    line = str(exc).strip().splitlines()[0].strip()
    return line if line.endswith((".", "!", "?")) else f"{line}."
