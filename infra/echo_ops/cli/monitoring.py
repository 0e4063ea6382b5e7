"""`echoswarm monitoring render`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import out
from echo_ops.monitoring.rendering import render
from echo_schemas.errors import UserError


def render_files(
    config: Config = None,
    into: Annotated[Path, typer.Option(help="The folder that the files go to.")] = Path("monitoring"),
    run: Annotated[
        list[Path] | None,
        typer.Option(help="A run's folder, for Prometheus to find its processes; may be repeated. The configured run's unless given."),
    ] = None,
    runbooks: Annotated[str, typer.Option(help="Address of the folder with the runbooks, which alerts point to.")] = "docs/runbooks",
) -> None:
    """Write the files and say what to do with them."""
    folders = run or [Path(read_settings(config).checkpoint.folder)]
    try:
        written = render(into, runs=folders, runbooks=runbooks)
    except OSError as exc:
        raise UserError(f"{into} cannot be written: {exc.strerror or exc}.", hint="Name another folder with --into.") from exc
    for path in written:
        out.print(str(path), markup=False)
    for folder in folders:
        processes = folder / "processes"
        there = "" if processes.is_dir() else ": not there yet; another run's with --config FILE or --run FOLDER"
        out.print(f"Prometheus finds the processes that are in {processes}{there}.", markup=False)
    out.print(f"Start it: prometheus --config.file={into / 'prometheus.yml'}; Grafana imports the JSON files. docs/monitoring.md has more.")
