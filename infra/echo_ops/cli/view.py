"""`echoswarm view`: the viewer, until Ctrl-C."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from echo_bus.bus import Bus
from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config, RunName
from echo_ops.cli.output import err, out, remark
from echo_ops.cli.past import history_of, past_of
from echo_ops.painting import Pieces
from echo_ops.viewer.drawings import Drawings
from echo_ops.viewer.server import ViewerServer
from echo_ops.viewer.source import Source
from echo_schemas.errors import UserError
from echo_schemas.libraries import ANALYSIS, require_libraries


def view(
    what: Annotated[str, typer.Argument(metavar="[RUN|FOLDER]", help="A run of the namespace, or a folder of an export.")] = "",
    config: Config = None,
    run: RunName = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 0,
    demo: Annotated[bool, typer.Option("--demo", help="Show small made-up runs: no Kafka, no run of your own is needed.")] = False,
    draw: Annotated[list[str] | None, typer.Option(help="TASK=FILE.py:FUNCTION draws the episodes of a task; may be repeated.")] = None,
) -> None:
    """Serve the viewer and print its address. `what` is a folder of an export, or a run; empty: `run`, or the configured one."""
    drawings = Drawings.parse(draw or ())
    export = Path(what) if what and Path(what).is_dir() else None
    if export is None and "/" in what:
        raise UserError(f"There is no folder {what}.", hint="Name a folder of `echoswarm export`, or a run of the namespace.")
    if what and (demo or (run and export is None)):
        raise UserError(f"{what} and {'--demo' if demo else '--run'} contradict each other.", hint="Leave one of them out.")
    pieces: Pieces | None = None
    if demo:
        bus, name, pieces = _demo(run)
    else:
        if export is not None:
            require_libraries("A view of an export", "duckdb", install=ANALYSIS)
        name, reach = past_of(read_settings(config), run or (what if export is None else ""), export)
        bus = reach()
    history = history_of(bus, name)
    remark("note", history.notes)
    source = Source(history.bus, history, drawings=drawings, export=export, pieces=pieces)
    with source, ViewerServer(source, port) as server:
        if demo:
            out.print("A made-up run: a script plays it in this process; nothing was trained, and nothing is kept.")
        out.print(f"{history.run_id} is shown at {server.url}")
        err.print("Only this machine can reach it. Ctrl-C ends.", style="dim")
        _until_ended()


def _until_ended() -> None:
    """Wait for Ctrl-C. Tests replace it."""
    threading.Event().wait()


def _demo(run: str) -> tuple[Bus, str, Pieces]:
    from echo_ops.viewer.demo.in_memory import DEMO_RUN, DEMO_RUNS, make_demo

    if run and run not in DEMO_RUNS:
        raise UserError(f"The demo has no run {run!r}.", hint=f"It has {', '.join(DEMO_RUNS)}.")
    bus, pieces = make_demo()
    return bus, run or DEMO_RUN, pieces
