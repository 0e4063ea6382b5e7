"""`echoswarm view`: the viewer, until Ctrl-C."""

from __future__ import annotations

import threading
from pathlib import Path

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.output import err, out
from echo_ops.cli.ranges import history_of
from echo_ops.viewer.server import ViewerServer
from echo_ops.viewer.source import Source


def view(config: Path | None, *, run: str, port: int) -> None:
    """Serve it and say where."""
    settings = read_settings(config)
    bus = reach_bus(settings)
    history = history_of(bus, run or settings.run.name)
    for note in history.notes:
        err.print(f"note: {note}", markup=False)
    with Source(history.bus, history) as source, ViewerServer(source, port) as server:
        out.print(f"{history.run_id} is shown at {server.url}")
        err.print("Only this machine can reach it. Ctrl-C ends.", style="dim")
        threading.Event().wait()
