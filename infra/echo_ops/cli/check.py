"""`echoswarm check`: what a run's file needs, and what in it will not work. Starts nothing."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.markup import escape

from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import ExitCode, out
from echo_ops.estimate import Assumptions, estimate
from echo_ops.estimate_lines import lines_of
from echo_ops.preflight import examine
from echo_schemas.errors import UserError
from echo_tasks.base_models import DEMO_PREFIX


def check(
    config: Config = None,
    answer_tokens: Annotated[float | None, typer.Option(min=1, help="Of a mean answer; without it half of max_new_tokens.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="Of a mean prompt; without it 256.")] = None,
    mbit_s: Annotated[float, typer.Option(min=0.001, help="Mbit/s of a worker's line.")] = 1000.0,
) -> None:
    """Print what the run needs (not for a demo model), and every finding; exits 2 if something stands in the way."""
    settings = read_settings(config)
    if not settings.policy.base.startswith(DEMO_PREFIX):
        try:
            assumed = Assumptions(answer_tokens=answer_tokens, prompt_tokens=prompt_tokens, mbit_s=mbit_s)
            for line in lines_of(estimate(settings, assumed)):
                out.print(line, markup=False, highlight=False)
        except UserError as exc:
            out.print(f"[yellow]–[/] {escape(exc.message)}\n    [dim]→ {escape(exc.hint)}[/]")
        out.print()
    num_problems = 0
    for finding in examine(settings):
        num_problems += not finding.is_note
        mark = "[yellow]–[/]" if finding.is_note else "[red]✗[/]"
        hint = f"\n    [dim]→ {escape(finding.hint)}[/]" if finding.hint else ""
        out.print(f"{mark} {escape(finding.message)}{hint}")
    if not num_problems:
        out.print(f"[green]✓[/] Nothing stands in the way of the run {escape(repr(settings.run.name))}.")
    sys.stdout.flush()
    # A reward function that hangs must not keep this process alive.
    os._exit(ExitCode.USAGE if num_problems else 0)
