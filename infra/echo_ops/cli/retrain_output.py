"""What `echoswarm retrain` says of each version that it trained again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_replay.retrain import Match
from echo_replay.what_if import Measured


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
