"""`echoswarm retrain`: train published versions again from the log, and compare the weights; or train them under other rewards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, RetrainOptions, taking
from echo_ops.cli.output import ExitCode
from echo_ops.ranges import parse_span
from echo_ops.rewards.weights import parse_weight
from echo_schemas.errors import UserError
from echo_schemas.libraries import LEARNER, library_missing
from echo_schemas.records import RewardTerm


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
