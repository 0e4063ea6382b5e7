"""`echoswarm fork`: a new run that begins at a version of the configured one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from echo_learner.start.fork import ForkOrder, fork_run
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, same_file
from echo_ops.cli.output import out
from echo_schemas.errors import UserError


def fork(
    name: Annotated[str, typer.Argument(help="Name of the new run.")],
    version: Annotated[int, typer.Option("--version", min=0, help="The version of the configured run that it begins at.")],
    config: Config = None,
    sha256: Annotated[str, typer.Option(metavar="HEX", help="First digits of that version's checksum, to be sure which weights.")] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="With a fresh optimizer; works for a version whose weights only the log has.")
    ] = False,
    parent: Annotated[str | None, typer.Option("--from", metavar="RUN", help="Fork this run instead of the configured one.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The new run's folder of checkpoints; by default beside the old one.")] = None,
) -> None:
    """Make the fork's first checkpoint and say how to start it."""
    settings = read_settings(config)
    if parent is not None:
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"name": parent})})
    folder = folder or Path(settings.checkpoint.folder).parent / name
    order = ForkOrder(run_id=name, folder=folder, version=version, sha256=sha256, weights_only=weights_only)
    try:
        settings.run.model_validate({**settings.run.model_dump(), "name": order.run_id})
    except ValueError as exc:
        raise UserError(f"{order.run_id!r} cannot be the name of a run.", hint="Letters, digits, '.', '_' and '-'.") from exc
    state = fork_run(reach_bus(settings), settings, order)
    assert state.origin is not None
    out.print(
        f"Run {state.run_id} begins at version {state.version} of {state.origin.run_id} ({state.origin.sha256[:12]}), "
        f"{'with a fresh optimizer' if order.weights_only else 'with its optimizer'}: {order.folder}"
    )
    variables = f"ECHO_RUN__NAME={shlex.quote(state.run_id)} ECHO_CHECKPOINT__FOLDER={shlex.quote(str(order.folder))}"
    out.print(f"Start it, or write both into a file of its own: {variables} echoswarm up{same_file(config)}")
