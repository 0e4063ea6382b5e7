"""`echoswarm topics …`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from echo_ops.cli.context import reach_cluster, read_settings
from echo_ops.cli.options import ClusterName, Config, same_file
from echo_ops.cli.output import ExitCode, out
from echo_ops.topic_admin import TopicAdmin
from echo_ops.topic_plan import Kind, Plan, Step, summarise
from echo_ops.topic_rendering import TopicFormat, render_topics
from echo_ops.topic_targets import SERVICES, Target, refusals
from echo_runtime.logins import ADMIN
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs

Force = Annotated[bool, typer.Option("--force", help="Let keyed topics grow.")]
_MARKS = {Kind.CREATE: "[green]+[/]", Kind.GROW: "[green]>[/]", Kind.SETTING: "[yellow]~[/]", Kind.REFUSED: "[red]![/]"}


def plan(config: Config = None, force: Force = False) -> None:
    made = _admin(config).plan(force=force)
    _show(made)
    if not made.is_empty:
        out.print(f"Do it with [bold]echoswarm topics apply{same_file(config)}[/].")


def apply(
    config: Config = None,
    force: Force = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="With --force: why durability may be lowered too.")] = "",
) -> None:
    if reason and not force:
        raise UserError("--reason says why durability is lowered, which needs --force.", hint="Add --force.")
    admin = _admin(config)
    made = admin.plan(force=force, lowers=bool(reason))
    _show(made)
    admin.apply(made)
    if made.refused:
        found = "One difference was" if len(made.refused) == 1 else f"{len(made.refused)} differences were"
        out.print(f"[red]{found} refused[/]; each line above says what to do.")
        sys.exit(ExitCode.DRIFT)
    if not made.is_empty:
        out.print("[green]Applied.[/]")


def check(
    config: Config = None,
    target: Annotated[Target | None, typer.Option(help="Ask no cluster; name the settings that this service refuses.")] = None,
) -> None:
    if target is not None:
        _check_target(target)
        return
    admin = _admin(config)
    made = admin.plan()
    _show(made)
    for name in admin.strangers():
        out.print(f"[yellow]?[/] {name}: below the namespace, and no file describes it")
    if not made.is_empty:
        sys.exit(ExitCode.DRIFT)


def _check_target(target: Target) -> None:
    """Print which settings of the topic files a service does not take. Exits 3 if there are any."""
    service = SERVICES[target]
    found = refusals(service, load_topic_specs())
    for each in found:
        where = each.topics[0] if len(each.topics) == 1 else f"{len(each.topics)} topics, {each.topics[0]} for one"
        out.print(f"[red]![/] [bold]{each.setting}[/] = {', '.join(each.values)} ({where}): {each.why}")
    for note in service.notes:
        out.print(f"[yellow]–[/] {escape(note)}")
    out.print(f"{service.title}: {service.page}", markup=False)
    if not found:
        out.print("[green]It takes every setting of the topic files.[/]")
        return
    out.print(
        "Make the topics without these: `echoswarm topics render` prints them for another tool. `topics check` then names them as drift."
    )
    sys.exit(ExitCode.DRIFT)


def render(
    config: Config = None,
    format_: Annotated[TopicFormat, typer.Option("--format", help="What to print.")] = TopicFormat.COMMANDS,
    cluster: ClusterName = "",
) -> None:
    """Write plain text, so that it can be piped into a file or a shell."""
    kafka = read_settings(config).kafka
    named = cluster or (
        "my-cluster" if format_ is TopicFormat.STRIMZI else "HOST:PORT" if kafka.bootstrap == "embedded" else kafka.bootstrap
    )
    sys.stdout.write(render_topics(format_, Namespace(kafka.namespace), cluster=named, replicas=kafka.replicas))


def _admin(config: Path | None) -> TopicAdmin:
    settings = read_settings(config)
    return TopicAdmin(reach_cluster(settings, ADMIN), Namespace(settings.kafka.namespace), replicas=settings.kafka.replicas)


def _show(made: Plan) -> None:
    if made.is_empty:
        out.print(f"[green]All {len(made.specs)} topics are as the files say.[/]")
        return
    for step in made.steps:
        out.print(_line(step))
    out.print(", ".join(f"{count} {kind}" for kind, count in summarise(made).items()))


def _line(step: Step) -> str:
    mark = _MARKS[step.kind]
    if step.kind is Kind.CREATE:
        return f"{mark} [bold]{step.topic}[/]  [dim]{step.after}[/]"
    change = f"{mark} [bold]{step.topic}[/]  {step.what}: [red]{step.before}[/] → [green]{step.after}[/]"
    return f"{change}\n    refused: {step.why}" if step.why else change
