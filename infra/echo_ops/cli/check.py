"""`echoswarm check`: is there anything in this file that will not work? Starts nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.markup import escape

from echo_ops.cli.context import read_settings
from echo_ops.cli.output import ExitCode, out
from echo_ops.preflight import examine


def check(config: Path | None) -> None:
    """Print every finding; exits 2 if something stands in the way."""
    settings = read_settings(config)
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
