"""The commands of whoever operates the cluster, from Kafka itself to dead letters, runs and alerts. Each body imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from echo_ops.cli.options import Config

commands = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
kafka = typer.Typer(no_args_is_help=True, help="A real Apache Kafka on this machine, from Python packages alone.")
topics = typer.Typer(no_args_is_help=True, help="Topics as code: compare the cluster with the topic files, and make it so.")
schemas = typer.Typer(no_args_is_help=True, help="Avro schemas: compatibility, ids, registration.")
acls = typer.Typer(no_args_is_help=True, help="Access lists, generated from topic files and roles.")
dlq = typer.Typer(no_args_is_help=True, help="Dead letters: what could not be used, brought back exactly once, or discarded.")
runs = typer.Typer(no_args_is_help=True, help="The runs of the namespace: which there are, pausing, stopping, removing.")
keys = typer.Typer(no_args_is_help=True, help="Keys that sign trajectories and rewards: whose is which.")
monitoring = typer.Typer(no_args_is_help=True, help="Alerts and dashboards for Prometheus and Grafana.")
commands.add_typer(kafka, name="kafka")
commands.add_typer(topics, name="topics")
commands.add_typer(schemas, name="schemas")
commands.add_typer(acls, name="acls")
commands.add_typer(dlq, name="dlq")
commands.add_typer(runs, name="runs")
commands.add_typer(keys, name="keys")
commands.add_typer(monitoring, name="monitoring")

ClusterName = Annotated[str, typer.Option(help="Strimzi's name of the cluster; for commands, its address.")]
RunId = Annotated[str, typer.Argument(help="The run, as `echoswarm runs list` names it.")]
DeadTopic = Annotated[str, typer.Argument(help="The topic that the messages belong on, such as trajectories.")]
Reasons = Annotated[list[str] | None, typer.Option("--reason", help="Only letters with this reason; may be repeated.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it.")]


@kafka.command("up")
def kafka_up(
    config: Config = None,
    brokers: Annotated[int | None, typer.Option(help="1, or 3 with replication. As many as there are, else 1.")] = None,
    registry: Annotated[bool, typer.Option("--registry", help="A Confluent-compatible schema registry beside it.")] = False,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="TLS, and a user for each role of the namespace with no more rights than it needs."),
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Where its data lives; kept between down and up.")] = None,
    port: Annotated[list[int] | None, typer.Option("--port", help="Port of each broker, in order; by default free ones.")] = None,
) -> None:
    """Start it in the background and wait until it answers."""
    from echo_ops.cli import kafka as commands

    commands.up(config, brokers, registry=registry, secure=secure, folder=folder, ports=tuple(port or ()))


@kafka.command("down")
def kafka_down(delete_data: Annotated[bool, typer.Option("--delete-data", help="Remove its data folder too.")] = False) -> None:
    """Stop it. Its data stays, unless told otherwise."""
    from echo_ops.cli import kafka as commands

    commands.down(delete_data=delete_data)


@kafka.command("status")
def kafka_status() -> None:
    """Say what runs, where, and whether it answers; exit 1 if it does not."""
    from echo_ops.cli import kafka as commands

    commands.status()


@topics.command("plan")
def topics_plan(config: Config = None, force: Annotated[bool, typer.Option("--force", help="Let keyed topics grow.")] = False) -> None:
    """Show what `apply` would do. Changes nothing."""
    from echo_ops.cli import topics as commands

    commands.plan(config, force=force)


@topics.command("apply")
def topics_apply(
    config: Config = None,
    force: Annotated[bool, typer.Option("--force", help="Let keyed topics grow.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="With --force: why durability may be lowered too.")] = "",
) -> None:
    """Create and change topics until they are as the files say. Never shrinks any; lowers durability only with --force and --reason."""
    from echo_ops.cli import topics as commands

    commands.apply(config, force=force, reason=reason)


@topics.command("check")
def topics_check(
    config: Config = None,
    target: Annotated[
        Literal["confluent-cloud", "msk", "redpanda", "event-hubs"] | None,
        typer.Option(help="Ask no cluster; name the settings that this service refuses."),
    ] = None,
) -> None:
    """Exit 0 if the cluster is as the files say, 3 if it has drifted. For CI."""
    from echo_ops.cli import topics as commands
    from echo_ops.topic_targets import Target

    if target is None:
        commands.check(config)
    else:
        commands.check_target(Target(target))


@topics.command("render")
def topics_render(
    config: Config = None,
    format_: Annotated[
        Literal["commands", "strimzi", "terraform", "asyncapi"], typer.Option("--format", help="What to print.")
    ] = "commands",
    cluster: ClusterName = "",
) -> None:
    """Print the topics for another tool to make or to show. Changes nothing."""
    from echo_ops.cli import topics as commands
    from echo_ops.topic_rendering import TopicFormat

    commands.render(config, TopicFormat(format_), cluster)


@schemas.command("check")
def schemas_check(
    update_lock: Annotated[bool, typer.Option("--update-lock", help="Give new schema files their ids in registry.lock.json.")] = False,
) -> None:
    """Every version of every record against every earlier one, both ways; and the lock file."""
    from echo_ops.cli import schemas as commands

    commands.check(update_lock=update_lock)


@schemas.command("register")
def schemas_register(
    config: Config = None,
    check: Annotated[bool, typer.Option("--check", help="Only say what is not registered, and end with 3 then: for CI.")] = False,
) -> None:
    """Register all schemas with the registry of [registry] url. Idempotent."""
    from echo_ops.cli import schemas as commands

    commands.register(config, is_check=check)


@acls.command("render")
def acls_render(
    config: Config = None,
    format_: Annotated[Literal["commands", "yaml", "json", "strimzi"], typer.Option("--format", help="What to print.")] = "commands",
    cluster: ClusterName = "",
) -> None:
    """Print the least that each role must be allowed. Changes nothing."""
    from echo_ops.cli import acls as commands

    commands.render(config, format_, cluster)


@dlq.command("list")
def dlq_list(
    topics: Annotated[list[str] | None, typer.Argument(help="Topics, such as trajectories; all unless given.")] = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """Say how many messages could not be used, by topic and reason, and how many of them wait."""
    from echo_ops.cli import dlq as commands

    commands.list_letters(config, topics or [], as_json=as_json)


@dlq.command("show")
def dlq_show(
    topic: DeadTopic,
    offset: Annotated[int | None, typer.Argument(help="Of the letter; the newest ones unless given.", min=0)] = None,
    config: Config = None,
    last: Annotated[int, typer.Option("--last", "-n", help="How many of the newest.", min=1)] = 5,
) -> None:
    """Print letters whole: what was wrong, where they lay, who wrote and who read them."""
    from echo_ops.cli import dlq as commands

    commands.show(config, topic, offset, last=last)


@dlq.command("redrive")
def dlq_redrive(
    topic: DeadTopic,
    config: Config = None,
    reason: Reasons = None,
    until: Annotated[str, typer.Option(help="Only letters before this time.")] = "",
    limit: Annotated[int | None, typer.Option(help="So many letters at most.", min=1)] = None,
    rate: Annotated[float | None, typer.Option(help="So many a second at most.", min=0.01)] = None,
    mend: Annotated[str, typer.Option(help="A function that mends a letter: file.py:function.")] = "",
    pass_by: Annotated[bool, typer.Option("--pass-by", help="Pass by letters that would come straight back.")] = False,
    yes: Yes = False,
) -> None:
    """Write letters to their topic again, each once; without --yes say what would be done."""
    from echo_ops.cli import dlq as commands

    commands.redrive(
        config, topic, reason or [], until=until, limit=limit, rate=rate, mend=mend, passes_by=pass_by, is_meant=yes
    )  # fmt: skip


@dlq.command("discard")
def dlq_discard(
    topic: DeadTopic,
    config: Config = None,
    reason: Reasons = None,
    until: Annotated[str, typer.Option(help="Only letters before this time.")] = "",
    yes: Yes = False,
) -> None:
    """Let letters wait no longer; without --yes say which. They stay readable until their retention is over."""
    from echo_ops.cli import dlq as commands

    commands.discard_letters(config, topic, reason or [], until=until, is_meant=yes)


@runs.command("list")
def runs_list(config: Config = None, as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False) -> None:
    """Say which runs the namespace has, and how each of them is."""
    from echo_ops.cli import runs as commands

    commands.list_runs(config, as_json=as_json)


@runs.command("show")
def runs_show(name: RunId, config: Config = None) -> None:
    """Say what a run is and how it stands."""
    from echo_ops.cli import runs as commands

    commands.show(config, name)


@runs.command("pause")
def runs_pause(name: RunId, config: Config = None) -> None:
    """Let a run stand still: no request is written, no step is trained; its processes wait."""
    from echo_ops.cli import runs as commands
    from echo_schemas.records import RunState

    commands.order(config, name, RunState.PAUSED)


@runs.command("resume")
def runs_resume(name: RunId, config: Config = None) -> None:
    """Let a paused or stopped run go on."""
    from echo_ops.cli import runs as commands
    from echo_schemas.records import RunState

    commands.order(config, name, RunState.RUNNING)


@runs.command("stop")
def runs_stop(name: RunId, config: Config = None) -> None:
    """Let a run end after its step, with everything saved and published."""
    from echo_ops.cli import runs as commands
    from echo_schemas.records import RunState

    commands.order(config, name, RunState.STOPPING)


@runs.command("archive")
def runs_archive(
    name: RunId,
    to: Annotated[Path, typer.Option(help="The folder; the archive is a folder of the run's name in it.")] = Path("archives"),
    weights: Annotated[
        Literal["newest", "all"], typer.Option(help="Of which versions the chunks are kept: of the newest one, or of all that are left.")
    ] = "newest",
    config: Config = None,
) -> None:
    """Keep a run that has ended in a folder, whole and verified, so that it may be deleted."""
    from echo_ops.cli import runs as commands

    commands.archive(config, name, to, all_weights=weights == "all")


@runs.command("restore")
def runs_restore(folder: Annotated[Path, typer.Argument(help="An archive: DIR/NAME of `runs archive`.")], config: Config = None) -> None:
    """Bring an archived run back into empty topics of its namespace, every record where it lay."""
    from echo_ops.cli import runs as commands

    commands.restore(config, folder)


@runs.command("delete")
def runs_delete(name: RunId, config: Config = None, yes: Yes = False) -> None:
    """Remove a run: topics, groups, access lists, checkpoints; without --yes say what there is of it."""
    from echo_ops.cli import runs as commands

    commands.delete(config, name, is_meant=yes)


@keys.command("new")
def keys_new(
    role: Annotated[Literal["worker", "reward", "offline", "rescore", "redrive"], typer.Argument(help="Whose key it is.")],
    name: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="The workers, or rewards, that it may speak for; by default any.")
    ] = None,
    config: Config = None,
    replace: Annotated[bool, typer.Option("--replace", help="In the place of the key that is there, which stays trusted.")] = False,
) -> None:
    """Make a key in the folder [trust] keys, and add its public half to the file [trust] signers."""
    from echo_ops.cli import keys as commands

    commands.new(config, role, tuple(name or ("*",)), replace=replace)


@keys.command("show")
def keys_show(config: Config = None) -> None:
    """List the keys that are trusted: id, whose, when they count, and which of them this machine has."""
    from echo_ops.cli import keys as commands

    commands.show(config)


@monitoring.command("render")
def monitoring_render(
    config: Config = None,
    into: Annotated[Path, typer.Option(help="The folder that the files go to.")] = Path("monitoring"),
    run: Annotated[
        list[Path] | None,
        typer.Option(help="A run's folder, for Prometheus to find its processes; may be repeated. The configured run's unless given."),
    ] = None,
    runbooks: Annotated[str, typer.Option(help="Address of the folder with the runbooks, which alerts point to.")] = "docs/runbooks",
) -> None:
    """Write alert rules, a scrape configuration and dashboards."""
    from echo_ops.cli import monitoring as commands

    commands.render_files(config, into, runs=run or [], runbooks=runbooks)
