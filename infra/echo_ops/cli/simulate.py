"""`echoswarm simulate`: a fleet of workers in simulated time. Starts nothing, needs no Kafka."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from echo_core.simulation.fleet import simulate as simulated
from echo_core.simulation.scenario import Scenario
from echo_ops.cli.options import Page
from echo_ops.cli.output import aligned, out
from echo_ops.simulation.compare import COLUMNS, Compared, compare, compare_page, plain, rows
from echo_ops.simulation.figures import as_plain, table
from echo_ops.simulation.file import read_scenario
from echo_ops.simulation.page import scenario_page
from echo_ops.simulation.paper import paper_scenario, reproduce
from echo_ops.simulation.paper_page import misses, paper_page
from echo_runtime.garbage import seldom_collected
from echo_schemas.errors import UserError


def simulate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The scenario, a TOML file (docs/simulate.md).")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="ECHO-2's figures and table 2 instead of a scenario.")] = False,
    compared: Annotated[
        Compared | None,
        typer.Option("--compare", help="The scenario under four policies for old samples, or under six budgets."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps that are counted, instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers, instead of the file's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    page: Page = None,
) -> None:
    """Simulate one scenario, or compare policies or budgets, or repeat the paper. Raises UserError if the learner came to a standstill."""
    if paper:
        _simulate_paper(as_json=as_json, page=page)
        return
    if file is None:
        raise UserError("No scenario was named.", hint="Give a TOML file (docs/simulate.md has one), or --paper.")
    scenario = read_scenario(file)
    changes: dict[str, Any] = {name: value for name, value in (("steps", steps), ("seed", seed)) if value is not None}
    scenario = replace(scenario, **changes)
    if compared is not None:
        _compare(file.stem, scenario, compared, as_json=as_json, page=page)
        return
    with seldom_collected():
        outcome = simulated(scenario)
    if page is not None:
        page.write_text(scenario_page(file.stem, scenario, outcome), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(as_plain(scenario, outcome), indent=1) + "\n")
    else:
        _print_rows(table(scenario, outcome))
    if len(outcome.steps) < outcome.wanted_steps:
        raise UserError(
            f"The learner trained {len(outcome.steps)} of {outcome.wanted_steps} steps, and then waited for groups that never came.",
            hint="Add workers, or let them fail less often than a group takes.",
        )


def _compare(name: str, scenario: Scenario, compared: Compared, *, as_json: bool, page: Path | None) -> None:
    with seldom_collected():
        found = compare(scenario, compared)
    if page is not None:
        page.write_text(compare_page(name, compared, found), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(plain(found), indent=1) + "\n")
    else:
        _print_rows([COLUMNS, *rows(found)])


def _simulate_paper(*, as_json: bool, page: Path | None) -> None:
    with seldom_collected():
        found = reproduce(paper_scenario())
    if page is not None:
        page.write_text(paper_page(found), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    lines: list[tuple[str, ...]] = [("table 2", "$ per step", "T_bcast", "wait", "by eq. 1")]
    for row in found["table2"]["rows"]:
        pairs = [f"{row['simulated'][name]:.5g} ({row['paper'][name]:g})" for name in ("cost_per_step", "broadcast_s", "wait_s")]
        lines.append((f"{row['method']}, {row['paper']['machines']} machines", *pairs, f"{row['by_rule']['wait_s']:.5g}"))
    _print_rows(lines)
    out.print("In brackets: the paper's.", *misses(found), sep="\n", markup=False)
    out.print(f"Figure 1: staleness 3 in {', '.join(found['fig1']['oldest_steps'])}.", markup=False)
    for curve in found["fig3c"]["curves"]:
        out.print(f"Figure 3c, S = {curve['budget']}: no bubble from {curve['enough_workers']} workers on.", markup=False)
    for row in found["cost_saving"]["rows"]:
        saved = f"{row['saving_sync']:.1%} against sync, {row['saving_async']:.1%} against async"
        out.print(f"Cost of a step, S = {row['budget']}: {saved}.", markup=False)


def _print_rows(lines: Sequence[Sequence[str]]) -> None:
    for line in aligned(lines):
        out.print(line, markup=False)
