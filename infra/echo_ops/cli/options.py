"""Options and arguments that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file. Without it run.toml, if there is one, else defaults and environment."),
]
RunName = Annotated[str, typer.Option("--run", metavar="NAME", help="Another run of the namespace than the configured one.")]
Exported = Annotated[Path | None, typer.Option("--from", metavar="FOLDER", help="An export. Without it the log itself is read.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs instead of a screen for people.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come, each when its fate is known or after a minute.")]
Page = Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write one HTML page with the curves.")]
RewardPath = Annotated[str, typer.Argument(metavar="REWARD", help="my_rewards.py:brevity, package.module:function, or a built-in name.")]
Since = Annotated[
    str, typer.Option(metavar="TIME", help="Written at this time or later: 2026-11-22T17:05:00 (UTC), or 90m, 2h or 3d for so long ago.")
]
Until = Annotated[str, typer.Option(metavar="TIME", help="Written at this time or before.")]
ClusterName = Annotated[str, typer.Option(help="Strimzi's name of the cluster; for commands, its address.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions:
    """Which records of the past, as the options were typed; empty where an option was not given."""

    version: Annotated[str, typer.Option(metavar="A..B", help="Trajectories with a token of one of these versions.")] = ""
    step: Annotated[str, typer.Option(metavar="A..B", help="Trajectories that were trained in these steps.")] = ""
    offsets: Annotated[list[str] | None, typer.Option(metavar="P:A..B", help="Offsets of a partition of trajectories; repeatable.")] = None
    since: Since = ""
    until: Until = ""
    groups: Annotated[list[str] | None, typer.Option("--group", metavar="GROUP", help="A group, such as demo/17 or 17; repeatable.")] = None
    worker: Annotated[str, typer.Option(metavar="NAME", help="Only samples of this worker.")] = ""
    task: Annotated[str, typer.Option(metavar="NAME", help="Only samples of this task.")] = ""
    purpose: Annotated[Literal["", "train", "eval", "probe"], typer.Option(help="Only samples with this purpose.")] = ""
    fate: Annotated[
        Literal["", "trained", "dropped", "dead", "evaluated", "probed", "open"], typer.Option(help="Only samples with this fate.")
    ] = ""
    sample: Annotated[int | None, typer.Option(min=0, help="Only this member of each group.")] = None


def taking(name: str, kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command that takes the options that the fields of the dataclass `kind` describe, in the place of its parameter `name`."""
    shared = inspect.signature(kind, eval_str=True).parameters

    def made(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def command(**given: Any) -> None:
            named = {field: given.pop(field) for field in shared if field in given}
            # Typer gives a list that nobody has named as None, or empty.
            body(**given, **{name: kind(**{field: value for field, value in named.items() if value != []})})

        own = [each for each in inspect.signature(body, eval_str=True).parameters.values() if each.name != name]
        merged = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own, *shared.values())]
        # What Typer reads.
        command.__annotations__ = {each.name: each.annotation for each in merged}
        command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]  # functions may have one
        return command

    return made


in_range = taking("options", RangeOptions)
