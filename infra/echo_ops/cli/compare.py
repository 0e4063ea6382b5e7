"""`echoswarm reward compare A B`: how two rewards of a run differ on the same samples."""

from __future__ import annotations

from typing import Annotated

import typer

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import out
from echo_ops.report.summary import or_dash
from echo_ops.rewards.comparison import Comparison, Moments
from echo_ops.rewards.comparison import compare as compare_rewards
from echo_ops.rewards.recent import newest_rewards
from echo_ops.rewards.weights import full_name
from echo_schemas.errors import UserError
from echo_schemas.records import RewardOutcome


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A reward of the run.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    config: Config = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many of the newest records of each partition.")] = 5000,
) -> None:
    """Print how they differ on the newest records. Raises UserError for a name without records, or where no sample has both."""
    settings = read_settings(config)
    bus = reach_bus(settings)
    rewards = [each for each in newest_rewards(bus, last) if each.outcome is RewardOutcome.SCORED]
    names = {reward.name for reward in rewards}
    a, b = full_name(first, names), full_name(second, names)
    by_name = {name: [reward for reward in rewards if reward.name == name] for name in (a, b)}
    found = compare_rewards(by_name[a], by_name[b])
    if found is None:
        raise UserError(
            f"No sample among the newest has a value of both {a!r} and {b!r}.", hint="Look at more with --last, or wait a moment."
        )
    for line in lines_of(a, b, found):
        out.print(line, markup=False)


def lines_of(a: str, b: str, found: Comparison) -> list[str]:
    """The comparison as lines of text."""
    width = max(len(a), len(b))
    lines = [f"{found.num_matched:,} samples have both, of {found.num_a:,} with {a} and {found.num_b:,} with {b}"]
    lines += [f"  {name.ljust(width)}  {_moments(moments)}" for name, moments in ((a, found.a), (b, found.b))]
    lines.append(
        f"  Pearson {or_dash(found.pearson, '.3f')}, Spearman {or_dash(found.spearman, '.3f')}, mean absolute difference {found.mae:.4g}"
    )
    if found.confusion is not None:
        neither, only_b, only_a, both = found.confusion
        lines.append(
            f"  both 1: {both:,}; only {a}: {only_a:,}; only {b}: {only_b:,}; both 0: {neither:,}; kappa {or_dash(found.kappa, '.3f')}"
        )
    if found.num_groups:
        lines.append(f"  within {found.num_groups:,} groups: rank correlation {or_dash(found.rank_within, '.3f')}")
        lines.append(f"  advantages that change their sign: {or_dash(found.flipped, '.1%')} of those that both have")
        lines.append(
            f"  groups without signal: {or_dash(found.flat_a, '.1%')} under {a}, {or_dash(found.flat_b, '.1%')} under {b}, "
            f"{or_dash(found.flat_either, '.1%')} under either"
        )
    return lines


def _moments(moments: Moments) -> str:
    return f"mean {moments.mean:.4g}, std {moments.std:.4g}, from {moments.minimum:.4g} to {moments.maximum:.4g}"
