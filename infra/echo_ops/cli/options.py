"""Options and arguments that several commands or modules have."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from echo_ops.ranges import RangeOptions

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file. Without it run.toml, if there is one, else defaults and environment."),
]
RunName = Annotated[str, typer.Option("--run", metavar="NAME", help="Another run of the namespace than the configured one.")]
Exported = Annotated[Path | None, typer.Option("--from", metavar="FOLDER", help="An export. Without it the log itself is read.")]
Late = Annotated[bool, typer.Option("--late", help="Also the rewards that were written more than a minute after the fate was known.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs instead of a screen for people.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come, each when its fate is known or after a minute.")]
Page = Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write one HTML page with the curves.")]
RewardPath = Annotated[str, typer.Argument(metavar="REWARD", help="my_rewards.py:brevity, package.module:function, or a built-in name.")]
ClusterName = Annotated[str, typer.Option(help="Strimzi's name of the cluster; for commands, its address.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it.")]


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


def same_file(config: Path | None) -> str:
    """What names the same file in a command that is suggested: ` --config FILE`; empty without one."""
    return "" if config is None else f" --config {shlex.quote(str(config))}"


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
