"""`echoswarm retrain`: train published versions again from the log, and say whether the same weights come out; or others, under other
rewards.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.output import ExitCode
from echo_ops.rewards.weights import parse_weight
from echo_schemas.errors import UserError
from echo_schemas.records import RewardTerm

if TYPE_CHECKING:
    # Its imports take seconds.
    from echo_replay.what_if import Measured

_VERSIONS = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainWish:
    """What the command line says. `rewards` empty: those of the reports; else `name=weight` each, and nothing but these."""

    versions: str
    from_start: bool = False
    tolerance: float = 0.0
    exact: bool = False
    ranks: int | None = None
    rewards: tuple[str, ...] = ()
    prompts: int = 64
    json_file: Path | None = None


def retrain(config: Path | None, wish: RetrainWish) -> None:
    """Train the versions again and compare each; ends the process with an exit code that says the worst, if nothing else was asked for than
    what the run did.
    """
    wanted, terms = parse_versions(wish.versions), parse_terms(wish.rewards)
    settings = read_settings(config)
    # Before the imports, which take seconds.
    bus = reach_bus(settings)
    logging.basicConfig(level=logging.WARNING)
    try:
        from echo_ops.cli.training_again import train_again
    except ModuleNotFoundError as exc:
        raise UserError(
            f"Retraining needs the library {exc.name!r}, which is not installed here.", hint="pip install 'echoswarm[learner]'"
        ) from exc
    if not train_again(settings, bus, wish, wanted, terms):
        sys.exit(ExitCode.BROKEN)


def measured_lines(version: int, measured: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """What is said of an evaluation."""
    width = max((len(before.name) for before, _ in measured), default=0)
    return [
        f"  {before.name.ljust(width)}  {_measured(before)} as version {version} was published, {_measured(after)} under the other rewards"
        for before, after in measured
    ]


def _measured(value: Measured) -> str:
    failed = f" ({value.num_failed} without a value)" if value.num_failed else ""
    return f"{value.mean:.4g} ± {value.stderr:.2g}{failed}"


def parse_terms(texts: Sequence[str]) -> tuple[RewardTerm, ...]:
    """`exact=1` and the like. Raises UserError for what is no weight, a name twice, or weights that are all 0."""
    pairs = [parse_weight(text) for text in texts]
    if len({name for name, _ in pairs}) < len(pairs):
        raise UserError("--rewards names a reward twice.", hint="One weight for each.")
    if pairs and not any(weight for _, weight in pairs):
        raise UserError(
            "All weights of --rewards are 0, so nothing would be trained.", hint="Such as --rewards exact=1 --rewards brevity=0.2."
        )
    return tuple(RewardTerm(name=name, weight=weight) for name, weight in pairs if weight)


def parse_versions(text: str) -> range:
    """`a..b`, both included, or one version. Raises UserError."""
    match = _VERSIONS.fullmatch(text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else -1
    if last < first:
        raise UserError(f"--version {text!r} names no versions.", hint="Write 3..8, from the lower to the higher, or a single one.")
    return range(first, last + 1)


def other_line(version: Any) -> str:
    """What is said of one version that was trained under other rewards."""
    if version.cosine is None or version.distance == 0.0:
        return f"version {version.version}: the same weights"
    return (
        f"version {version.version}: {version.distance:.2g} of the way from the start beside what was published; cosine of the two ways "
        f"{version.cosine:.3f}"
    )


def line_of(version: Any, num_ranks: int) -> str:
    """What is said of one version."""
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
