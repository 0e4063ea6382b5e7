"""The commands that read a run's past: show, lineage, search, replay, export, sql, view. Each body imports what it needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from echo_ops.cli.options import Config, RangeOptions

commands = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)

RunName = Annotated[str, typer.Option("--run", metavar="NAME", help="Another run of the namespace than the configured one.")]
Exported = Annotated[Path | None, typer.Option("--from", metavar="FOLDER", help="An export. Without it the log itself is read.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs instead of a screen for people.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come, each when its fate is known or after a minute.")]


def _range_options(
    version: Annotated[str, typer.Option(metavar="A..B", help="Trajectories of which one of these versions made a token.")] = "",
    step: Annotated[str, typer.Option(metavar="A..B", help="Trajectories that were trained in these steps.")] = "",
    offsets: Annotated[list[str] | None, typer.Option(metavar="P:A..B", help="Offsets of a partition of trajectories; repeatable.")] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="Written at this time or later: 2026-11-22T17:05:00, or 2h ago.")] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Written at this time or before.")] = "",
    group: Annotated[list[str] | None, typer.Option(metavar="GROUP", help="A group, such as demo/17 or 17; repeatable.")] = None,
    worker: Annotated[str, typer.Option(metavar="NAME", help="Only what this worker sampled.")] = "",
    task: Annotated[str, typer.Option(metavar="NAME", help="Only of this task.")] = "",
    purpose: Annotated[Literal["", "train", "eval", "probe"], typer.Option(help="Only what was sampled for this.")] = "",
    fate: Annotated[
        Literal["", "trained", "dropped", "dead", "evaluated", "probed", "open"], typer.Option(help="Only what became this.")
    ] = "",
    sample: Annotated[int | None, typer.Option(min=0, help="Only this member of each group.")] = None,
) -> RangeOptions:
    return RangeOptions(
        version=version, step=step, offsets=tuple(offsets or ()), since=since, until=until, groups=tuple(group or ()),
        worker=worker, task=task, purpose=purpose, fate=fate, sample=sample,
    )  # fmt: skip


def _in_range(body: Callable[..., None]) -> Callable[..., None]:
    """A command that has the options of `_range_options` in the place of its parameter `options`."""
    shared = inspect.signature(_range_options, eval_str=True).parameters

    @functools.wraps(body)
    def command(**given: Any) -> None:
        named = {name: given.pop(name) for name in shared}
        body(**given, options=_range_options(**named))

    own = [each for each in inspect.signature(body, eval_str=True).parameters.values() if each.name != "options"]
    merged = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own, *shared.values())]
    # What Typer reads.
    command.__annotations__ = {each.name: each.annotation for each in merged}
    command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]  # functions may have one
    return command


@commands.command("show")
def show(
    target: Annotated[str, typer.Argument(help="A group (demo/17 or 17), a record (3:1234, partition and offset) or a step (v120).")],
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    colour: Annotated[
        Literal["logprob", "advantage", "version", "none"], typer.Option("--color", help="What the colour of a token says.")
    ] = "logprob",
    as_json: AsJson = False,
) -> None:
    """Read a group, a record or a step: text by token, versions, turns, rewards by name, and what became of it."""
    from echo_ops.cli import show as body
    from echo_ops.cli.painting import Colour

    body.show(config, target, run=run, export=source, colour=Colour(colour), as_json=as_json)


@commands.command("lineage")
def lineage(
    version: Annotated[str, typer.Argument(help="A version, such as v120.")],
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    as_json: AsJson = False,
) -> None:
    """Say what made the weights of a version (groups, workers, rewards, checkpoint), and what became of its samples."""
    from echo_ops.cli import lineage as body

    body.lineage(config, version, run=run, export=source, as_json=as_json)


@commands.command("search")
@_in_range
def search(
    pattern: Annotated[str | None, typer.Argument(help="A regular expression (Python's), in prompts and answers.")] = None,
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    tokens: Annotated[str, typer.Option(metavar="17,4,9", help="Token ids that follow one another, instead of a text.")] = "",
    within: Annotated[Literal["prompt", "answer", "both"], typer.Option("--in", help="Where to look for a text.")] = "both",
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Capital letters are as small ones.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Stop after so many; 0: find all.")] = 100,
    *,
    options: RangeOptions,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Find trajectories by their text or their tokens, in one range of the past or in all of it."""
    from echo_ops.cli import search as body

    body.search(
        config,
        pattern,
        options,
        run=run,
        export=source,
        tokens=tokens,
        within=within,
        ignore_case=ignore_case,
        limit=limit,
        follow=follow,
        as_json=as_json,
    )


@commands.command("replay")
@_in_range
def replay(
    into: Annotated[
        str,
        typer.Option(
            "--into", metavar="TARGET", help="A topic, a FILE.jsonl, a folder (with a slash in its name), or - for standard output."
        ),
    ],
    config: Config = None,
    run: RunName = "",
    rate: Annotated[float | None, typer.Option(min=0.001, help="Records a second at most.")] = None,
    pace: Annotated[Literal["full", "original"], typer.Option(help="As fast as it goes, or with the gaps they once had.")] = "full",
    *,
    options: RangeOptions,
    follow: Follow = False,
) -> None:
    """Write trajectories of the past again, byte for byte, each with where it comes from."""
    from echo_ops.cli import replay as body

    body.replay(config, options, into, run=run, rate=rate, pace=pace, follow=follow)


@commands.command("rescore")
@_in_range
def rescore(
    path: Annotated[str, typer.Argument(metavar="REWARD", help="my_rewards.py:brevity, package.module:function, or a built-in name.")],
    config: Config = None,
    run: RunName = "",
    into: Annotated[str, typer.Option(metavar="rewards|FOLDER", help="The topic rewards, or a folder of Parquet files.")] = "rewards",
    name: Annotated[str, typer.Option(help="What it is called in the records; by default as it is named here.")] = "",
    against: Annotated[str, typer.Option(metavar="NAME", help="Compare it with this reward; by default with the run's first.")] = "",
    processes: Annotated[int, typer.Option(min=1, max=64, help="Scoring processes.")] = 2,
    *,
    options: RangeOptions,
    force: Annotated[bool, typer.Option("--force", help="Also a reward that says that it cannot be repeated.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Score a few, say what all of it costs, and write nothing.")] = False,
) -> None:
    """Score a range of the past with another reward, or another version of one, and compare. Killed, the same command goes on."""
    from echo_ops.cli import rescore as body

    wish = body.Wish(
        path=path, into=into, name=name, against=against, processes=processes, run=run, force=force, dry_run=dry_run
    )  # fmt: skip
    body.rescore(config, options, wish)


@commands.command("export")
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the files go; a run has a folder in it, run=NAME.")],
    config: Config = None,
    run: RunName = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, metavar="S", help="With --follow: seconds between two exports.")] = 30.0,
    verify: Annotated[bool, typer.Option("--verify", help="Export nothing: check every file that the manifest names.")] = False,
    iceberg: Annotated[str, typer.Option(metavar="CATALOG.NAMESPACE", help="Then bring these Iceberg tables to where the export is.")] = "",
) -> None:
    """Write a run as Parquet files, or add to them what is new: each record once, whatever was killed meanwhile."""
    from echo_ops.cli import export as body

    if verify:
        body.verify(to, run=run)
    else:
        body.export(config, to, run=run, follow=follow, every_s=every, iceberg=iceberg)


@commands.command("sql")
@_in_range
def sql(
    question: Annotated[str, typer.Argument(help="One SELECT over trajectories, samples, groups, steps, rewards, drops, workers.")],
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    most: Annotated[int, typer.Option(min=1, help="Of the log: refuse a range of more trajectories than this.")] = 50_000,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds that an answer may take.")] = 60.0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Rows that are shown; 0: all.")] = 100,
    format_: Annotated[Literal["table", "json", "csv"], typer.Option("--format", help="How the answer is written.")] = "table",
    *,
    options: RangeOptions,
) -> None:
    """Ask a run's past in SQL: an export (--from), or one range of the log."""
    from echo_ops.cli import sql as body

    body.sql(
        config, question, options, run=run, source=source, most=most, timeout_s=timeout, limit=limit, format_=format_
    )  # fmt: skip


@commands.command("view")
def view(
    what: Annotated[str, typer.Argument(metavar="[RUN|FOLDER]", help="A run of the namespace, or a folder of an export.")] = "",
    config: Config = None,
    run: RunName = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 0,
    demo: Annotated[bool, typer.Option("--demo", help="Show small made-up runs: no Kafka, no run of your own is needed.")] = False,
    draw: Annotated[list[str] | None, typer.Option(help="TASK=FILE.py:FUNCTION draws the episodes of a task; may be repeated.")] = None,
) -> None:
    """Look at a run in a browser: from a curve to the token, who did what when, questions in SQL. Reads the log, live, or an export; only
    this machine reaches it.
    """
    from echo_ops.cli import view as body

    body.view(config, what, run=run, port=port, demo=demo, draw=draw or ())
