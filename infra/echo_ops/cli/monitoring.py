"""`echoswarm monitoring render`."""

from __future__ import annotations

from pathlib import Path

from echo_ops.cli.context import read_settings
from echo_ops.cli.output import out
from echo_ops.monitoring.rendering import render
from echo_schemas.errors import UserError


def render_files(config: Path | None, into: Path, *, runs: list[Path], runbooks: str) -> None:
    """Write the files and say what to do with them. `runs`: the runs' folders; that of the configured run if there are none."""
    folders = runs or [Path(read_settings(config).checkpoint.folder)]
    try:
        written = render(into, runs=folders, runbooks=runbooks)
    except OSError as exc:
        raise UserError(f"{into} cannot be written: {exc.strerror or exc}.", hint="Name another folder with --into.") from exc
    for path in written:
        out.print(str(path), markup=False)
    out.print(f"Start it: prometheus --config.file={into / 'prometheus.yml'}; Grafana imports the JSON files. docs/monitoring.md has more.")
