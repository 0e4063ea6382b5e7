"""`echoswarm kafka …`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_embedded import detached
from echo_ops.access import admit_roles
from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config, same_file
from echo_ops.cli.output import ExitCode, out
from echo_schemas.naming import Namespace


def up(
    config: Config = None,
    brokers: Annotated[int | None, typer.Option(help="1, or 3 with replication; by default as many as it has already, else 1.")] = None,
    registry: Annotated[bool, typer.Option("--registry", help="A Confluent-compatible schema registry beside it.")] = False,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="TLS, and a user for each role of the namespace with no more rights than it needs."),
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Where its data lives; kept between down and up.")] = None,
    port: Annotated[
        list[int] | None, typer.Option("--port", min=1, max=65535, help="Port of each broker, in order; by default free ones.")
    ] = None,
) -> None:
    settings = read_settings(config)
    state = detached.up(
        brokers,
        registry=registry,
        secure=secure,
        folder=folder,
        ports=tuple(port or ()),
        report=lambda line: out.print(f"[dim]{line}[/]"),
    )
    out.print(f"[green]Kafka answers[/] at [bold]{state.bootstrap}[/]")
    if state.registry_url:
        out.print(f"[green]Registry[/] at [bold]{state.registry_url}[/]  (use it: [bold]export ECHO_REGISTRY__URL={state.registry_url}[/])")
    if state.is_secure:
        logins = admit_roles(state, Namespace(settings.kafka.namespace))
        out.print(f"[green]Secured[/]: TLS, and a user with its own rights for each role of {settings.kafka.namespace}; logins in {logins}")
    out.print(f"Next: [bold]echoswarm topics apply{same_file(config)}[/]. Stop it with [bold]echoswarm kafka down[/].")


def down(delete_data: Annotated[bool, typer.Option("--delete-data", help="Remove its data folder too.")] = False) -> None:
    state = detached.down(delete_data=delete_data)
    if state is None:
        out.print("No embedded Kafka was running.")
        return
    out.print(f"Stopped. Its data {'is removed' if delete_data else f'stays in {state.folder}'}.")


def status() -> None:
    found = detached.status()
    if found is None:
        out.print("No embedded Kafka runs. Start one with [bold]echoswarm kafka up[/].")
        sys.exit(ExitCode.FAILED)
    state = found.state
    colour = "green" if found.healthy else "red"
    out.print(f"[{colour}]{found.num_answering} of {state.num_brokers} brokers answer[/] at [bold]{state.bootstrap}[/]")
    if state.registry_url:
        verdict = "[green]answers[/]" if found.registry_answers else "[red]does not answer[/]"
        out.print(f"Registry {verdict} at [bold]{state.registry_url}[/]")
    hung = [process for process in found.running if not found.answers(process)]
    for process in state.processes:
        alive = (
            "[red]gone[/]" if process not in found.running else "[red]runs and does not answer[/]" if process in hung else "[green]runs[/]"
        )
        where = f", at {address}" if (address := state.address_of(process.name)) else ""
        out.print(f"  {process.name}: {alive}{where}, pid {process.pid}")
    out.print(f"  data and logs: {state.folder}")
    if not found.healthy:
        if hung:
            pids = " ".join(str(process.pid) for process in hung)
            out.print(f"If these processes still do not answer, end them: [bold]kill -9 {pids}[/], and go on with the next line.")
        out.print("Start what is missing with [bold]echoswarm kafka up[/]: on its old port; what runs is left alone.")
        sys.exit(ExitCode.FAILED)
