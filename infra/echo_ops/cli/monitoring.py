"""`echoswarm monitoring render`."""

from __future__ import annotations

from pathlib import Path

from echo_ops.cli.output import out
from echo_ops.monitoring.rendering import render
from echo_schemas.errors import UserError


def render_files(into: Path, *, runs: Path, runbooks: str) -> None:
    """Write the files and say what to do with them."""
    try:
        written = render(into, runs=runs, runbooks=runbooks)
    except OSError as exc:
        raise UserError(f"{into} cannot be written: {exc.strerror or exc}.", hint="Name another folder with --into.") from exc
    for path in written:
        out.print(str(path), markup=False)
    out.print(f"Start it: prometheus --config.file={into / 'prometheus.yml'}; Grafana imports the JSON files. docs/monitoring.md has more.")
