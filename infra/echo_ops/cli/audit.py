"""`echoswarm audit`: what the log proves of a run, one line a promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import ExitCode, err, out
from echo_replay.audit import audit_run
from echo_replay.verdicts import SENTENCES, AuditReport, Finding, Verdict

_STYLES = {Verdict.PROVED: "green", Verdict.UNPROVED: "yellow", Verdict.BROKEN: "bold red"}
_CODES = {Verdict.PROVED: 0, Verdict.UNPROVED: ExitCode.UNPROVED, Verdict.BROKEN: ExitCode.BROKEN}


def audit(
    config: Config = None,
    run: Annotated[list[str] | None, typer.Option("--run", metavar="NAME", help="A run of the namespace; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write all findings there.")] = None,
    allow_unproved: Annotated[
        bool, typer.Option("--allow-unproved", help="Exit 0 also where retention has removed what a proof needs.")
    ] = False,
) -> None:
    """Audit the run of the configuration, or each of `run`; ends the process with the worst verdict's code."""
    settings = read_settings(config)
    bus = reach_bus(settings)
    reports = [audit_run(bus, name) for name in run or [settings.run.name]]
    for report in reports:
        show(report)
    if json_file is not None:
        json_file.write_text(json.dumps({"runs": [report.to_plain() for report in reports]}, indent=1) + "\n", encoding="utf-8")
    worst = max(reports, key=lambda report: list(_CODES).index(report.verdict)).verdict
    code = 0 if allow_unproved and worst is Verdict.UNPROVED else _CODES[worst]
    if code:
        sys.exit(code)


def show(report: AuditReport) -> None:
    """Print the report."""
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in report.counts.items() if count)
    out.print(
        f"[bold]{escape(report.run_id)}[/]: {report.num_steps:,} steps, {report.num_trajectories:,} trajectory records "
        f"({counts or 'none'}), audited in {report.seconds:.1f} s"
    )
    for finding in report.findings:
        _show_finding(finding)


def _show_finding(finding: Finding) -> None:
    verdict = finding.verdict
    said = verdict.value.upper() if verdict is Verdict.BROKEN else verdict.value
    out.print(f"  [{_STYLES[verdict]}]{said:<8}[/]  {escape(SENTENCES[finding.promise])} [dim]({finding.num_looked_at:,})[/]")
    for example in finding.examples:
        where = ", ".join(f"{name} {value}" for name, value in example.where.items())
        err.print(f"            {escape(example.says)} {escape(where)}")
    if (more := finding.num_broken - len(finding.examples)) > 0:
        err.print(f"            … and {more:,} more")
    for gap in finding.gaps:
        out.print(f"            [dim]because {escape(gap)}[/]")
    for note in finding.notes:
        out.print(f"            [dim]{escape(note)}[/]")
