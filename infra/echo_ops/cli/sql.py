"""`echoswarm sql`: a question in SQL to an export or to the log itself."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.table import Table as Screen

from echo_bus.clock import SystemClock
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, Exported, RunName, in_range
from echo_ops.cli.output import err, out, remark
from echo_ops.cli.past import history_of, run_named
from echo_ops.harmless import harmless
from echo_ops.ranges import RangeOptions, selection_of
from echo_schemas.errors import UserError
from echo_schemas.libraries import ANALYSIS, require_libraries

if TYPE_CHECKING:
    from echo_replay.export.queries import Answer

# With more columns than this, each row is shown as a list.
_MOST_ABREAST = 10
Format = Literal["table", "json", "csv"]


@in_range
def sql(
    question: Annotated[str, typer.Argument(help="One SELECT over trajectories, samples, groups, steps, rewards, drops, workers.")],
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    most: Annotated[int, typer.Option(min=1, help="Of the log: refuse a range of more trajectories than this.")] = 50_000,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds that an answer may take.")] = 60.0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Rows that are shown; 0: all.")] = 100,
    format_: Annotated[Format, typer.Option("--format", help="How the answer is written.")] = "table",
    *,
    options: RangeOptions,
) -> None:
    """Print the answer."""
    require_libraries("A question in SQL", "pyarrow", "duckdb", install=ANALYSIS)
    from echo_replay.export.manifest import open_export
    from echo_replay.export.queries import ask

    if source is not None:
        if options != RangeOptions():
            raise UserError("A range is for a question to the log; --from names an export.", hint="Write the range as a WHERE instead.")
        home, manifest = open_export(source, run and run_named(run))
        _show(ask(home, manifest, question, timeout_s=timeout, limit=limit), format_)
        return
    _show(_ask_the_log(config, question, options, run=run, most=most, timeout_s=timeout, limit=limit), format_)


def _ask_the_log(
    config: Path | None, question: str, options: RangeOptions, *, run: str, most: int, timeout_s: float, limit: int
) -> Answer:  # fmt: skip
    from echo_replay.export.bounded import folder_of_part, load_part
    from echo_replay.export.queries import ask, check_question

    check_question(question)
    settings = read_settings(config)
    run_id = run or settings.run.name
    selection = selection_of(options, run_id, SystemClock().time_ms())
    with folder_of_part() as folder:
        with history_of(reach_bus(settings), run_id) as history:
            manifest = load_part(history, history.read(selection), most, folder)
            remark("missing", history.missing)
        return ask(folder, manifest, question, timeout_s=timeout_s, limit=limit)


def _show(answer: Answer, format_: Format) -> None:
    if format_ == "json":
        for row in answer.rows:
            values = (None if isinstance(value, float) and not math.isfinite(value) else value for value in row)
            sys.stdout.write(json.dumps(dict(zip(answer.columns, values, strict=True)), default=str) + "\n")
    elif format_ == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(answer.columns)
        # A program gets the texts as they are; nothing in them may move a terminal.
        writer.writerows([harmless(value) if out.is_terminal and isinstance(value, str) else value for value in row] for row in answer.rows)
    elif len(answer.columns) > _MOST_ABREAST:
        for row in answer.rows:
            screen = Screen(box=None, show_header=False, pad_edge=False)
            for name, value in zip(answer.columns, row, strict=True):
                screen.add_row(f"[dim]{_cell(name)}[/]", _cell(value))
            out.print(screen, "")
    else:
        screen = Screen(*map(_cell, answer.columns), box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for row in answer.rows:
            screen.add_row(*(_cell(value) for value in row))
        out.print(screen)
    if answer.is_cut:
        err.print(f"only the first {len(answer.rows):,} rows are shown; --limit 0 shows all", markup=False)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return harmless(text).replace("[", r"\[")
