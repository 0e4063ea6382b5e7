"""`echoswarm check`: what does this file need, and is there anything in it that will not work? Starts nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.markup import escape

from echo_ops.cli.context import read_settings
from echo_ops.cli.output import ExitCode, out
from echo_ops.estimate import Assumed, estimate
from echo_ops.estimate_lines import lines_of
from echo_ops.preflight import examine
from echo_schemas.errors import UserError
from echo_tasks.base_models import DEMO_PREFIX


def check(config: Path | None, assumed: Assumed) -> None:
    """Print what the run needs, unless it is a demo model's, and every finding; exits 2 if something stands in the way."""
    settings = read_settings(config)
    if not settings.policy.base.startswith(DEMO_PREFIX):
        try:
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
    # A reward that hangs must not keep the command.
    os._exit(ExitCode.USAGE if num_problems else 0)
