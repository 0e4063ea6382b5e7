"""`echoswarm view`: the viewer, until Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from echo_bus.bus import Bus
from echo_ops.cli.analysis import require_analysis
from echo_ops.cli.context import read_settings
from echo_ops.cli.output import err, out
from echo_ops.cli.painting import Pieces
from echo_ops.cli.ranges import history_of, past_of
from echo_ops.viewer.drawings import Drawings
from echo_ops.viewer.server import ViewerServer
from echo_ops.viewer.source import Source, SourceOptions
from echo_schemas.errors import UserError


def view(config: Path | None, what: str, *, run: str, port: int, demo: bool, draw: Sequence[str]) -> None:
    """Serve it and say where. `what`: a folder of an export, or a run; else `run`, or the configured one."""
    drawings = Drawings.parse(draw)
    export = Path(what) if what and Path(what).is_dir() else None
    if what and (demo or (run and export is None)):
        raise UserError(f"{what} and {'--demo' if demo else '--run'} contradict each other.", hint="Leave one of them out.")
    pieces: Pieces | None = None
    if demo:
        bus, name, pieces = _demo(run)
    else:
        if export is not None:
            require_analysis("duckdb")
        name, reach = past_of(read_settings(config), run or (what if export is None else ""), export)
        bus = reach()
    history = history_of(bus, name)
    for note in history.notes:
        err.print(f"note: {note}", markup=False)
    options = SourceOptions(drawings=drawings, export=export, pieces=pieces)
    with Source(history.bus, history, options) as source, ViewerServer(source, port) as server:
        if demo:
            out.print("A made-up run: played by a script, in this process; nothing was trained, and nothing is kept.")
        out.print(f"{history.run_id} is shown at {server.url}")
        err.print("Only this machine can reach it. Ctrl-C ends.", style="dim")
        _until_ended()


def _until_ended() -> None:
    """Ctrl-C ends it."""
    threading.Event().wait()


def _demo(run: str) -> tuple[Bus, str, Pieces]:
    from echo_ops.viewer.demo.in_memory import DEMO_RUN, DEMO_RUNS, make_demo

    if run and run not in DEMO_RUNS:
        raise UserError(f"The demo has no run {run!r}.", hint=f"It has {', '.join(DEMO_RUNS)}.")
    bus, pieces = make_demo()
    return bus, run or DEMO_RUN, pieces
