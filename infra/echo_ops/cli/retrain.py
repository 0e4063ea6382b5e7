"""`echoswarm retrain`: train published versions again from the log, and compare the weights; or train them under other rewards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, taking
from echo_ops.cli.output import ExitCode
from echo_ops.ranges import parse_span
from echo_ops.rewards.weights import parse_weight
from echo_schemas.errors import UserError
from echo_schemas.libraries import LEARNER, library_missing
from echo_schemas.records import RewardTerm

if TYPE_CHECKING:
    # Its imports take seconds.
    from echo_replay.what_if import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainOptions:
    """How to train again, and how to compare."""

    from_start: Annotated[bool, typer.Option("--from-start", help="From the base model, though a nearer checkpoint is kept.")] = False
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far off the weights may be, as a share of the way that training has moved them.")
    ] = 0.02
    exact: Annotated[bool, typer.Option("--exact", help="Every byte must be the same; the machine, threads and ranks must be, too.")] = (
        False
    )
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes that train together, if not those of the file.")] = None
    prompts: Annotated[int, typer.Option(min=0, help="With --rewards: held-out prompts to evaluate on; 0: none.")] = 64
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write the result of each version there.")
    ] = None


@taking("options", RetrainOptions)
def retrain(
    version: Annotated[str, typer.Option("--version", metavar="A..B", help="Published versions to train again, both included, or one.")],
    config: Config = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option("--rewards", metavar="NAME=WEIGHT", help="Train on these rewards only, instead of the run's own. Repeatable."),
    ] = None,
    *,
    options: RetrainOptions,
) -> None:
    """Train the versions again and compare each. Under the run's own rewards, exits 4 if one differs."""
    wanted, terms = parse_versions(version), parse_terms(rewards or ())
    if options.exact:
        options = replace(options, tolerance=0.0)
    settings = read_settings(config)
    # Before the imports, which take seconds.
    bus = reach_bus(settings)
    logging.basicConfig(level=logging.WARNING)
    try:
        from echo_ops.cli.training_again import train_again
    except ModuleNotFoundError as exc:
        raise library_missing("Retraining", exc.name, LEARNER) from exc
    if not train_again(settings, bus, options, wanted, terms):
        sys.exit(ExitCode.BROKEN)


def measured_lines(version: int, measured: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """A line for each reward of an evaluation."""
    width = max((len(before.name) for before, _ in measured), default=0)
    return [
        f"  {before.name.ljust(width)}  {_measured(before)} as version {version} was published, {_measured(after)} under the other rewards"
        for before, after in measured
    ]


def _measured(value: Measured) -> str:
    failed = f" ({value.num_failed} without a value)" if value.num_failed else ""
    return f"{value.mean:.4g} ± {value.stderr:.2g}{failed}"


def parse_terms(texts: Sequence[str]) -> tuple[RewardTerm, ...]:
    """The terms of `exact=1` and the like. Raises UserError for a malformed weight, a name given twice, or weights that are all 0."""
    pairs = [parse_weight(text) for text in texts]
    if len({name for name, _ in pairs}) < len(pairs):
        raise UserError("--rewards names a reward twice.", hint="One weight for each.")
    if pairs and not any(weight for _, weight in pairs):
        raise UserError(
            "All weights of --rewards are 0, so nothing would be trained.", hint="Write, say, --rewards exact=1 --rewards brevity=0.2."
        )
    return tuple(RewardTerm(name=name, weight=weight) for name, weight in pairs if weight)


def parse_versions(text: str) -> range:
    """`a..b`, both included, or one version. Raises UserError."""
    first, last = parse_span(text, "--version")
    return range(first, last + 1)


def other_line(version: Any) -> str:
    """The line of a version that was trained under other rewards."""
    if version.cosine is None or version.distance == 0.0:
        return f"version {version.version}: the same weights"
    return (
        f"version {version.version}: {version.distance:.2g} of the way from the start beside what was published; cosine of the two ways "
        f"{version.cosine:.3f}"
    )


def line_of(version: Any, num_ranks: int) -> str:
    """The line of a version that was trained under the run's own rewards."""
    from echo_replay.retrain import Match

    head = f"version {version.version}: "
    tail = "" if version.world_size == num_ranks else f" (trained on {version.world_size} ranks, now on {num_ranks})"
    match version.match:
        case Match.IDENTICAL:
            return f"{head}[green]identical[/], sha256 {version.sha256[:12]}{tail}"
        case Match.WITHIN:
            return f"{head}[yellow]within tolerance[/], off by {version.distance:.2g} of the way from the start{tail}"
        case _:
            return (
                f"{head}[bold red]DIFFERS[/] by {version.distance:.2g} of the way from the start: {version.sha256[:12]}, published "
                f"{version.published_sha256[:12]}{tail}"
            )
