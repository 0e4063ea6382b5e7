"""`echoswarm schemas …`."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import ExitCode, fail, out
from echo_schemas.compatibility import check_all
from echo_schemas.naming import Namespace
from echo_schemas.registry import HttpRegistry, LockFileRegistry, make_lock, subjects_of
from echo_schemas.schemas import all_schemas
from echo_schemas.topic_files import load_topic_specs


def check(
    update_lock: Annotated[bool, typer.Option("--update-lock", help="Give new schema files their ids in registry.lock.json.")] = False,
) -> None:
    found = check_all()
    for problem in found:
        out.print(f"[red]![/] {problem.reader} cannot read {problem.writer}: {problem.why}")
    if found:
        sys.exit(ExitCode.DRIFT)
    if update_lock:
        file = Path(str(resources.files("echo_schemas") / "registry.lock.json"))
        existing = json.loads(file.read_text(encoding="utf-8"))
        lock = make_lock(existing)
        file.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")
        out.print(f"{len(lock) - len(existing)} new ids in {file.name}.")
    LockFileRegistry()
    out.print(f"[green]{len(all_schemas())} schemas: every version reads every other, and each has its id.[/]")


def register(
    config: Config = None,
    only_check: Annotated[bool, typer.Option("--check", help="Only say what is not registered, and end with 3 then: for CI.")] = False,
) -> None:
    settings = read_settings(config)
    if not settings.registry.url:
        fail(
            "No registry is configured.",
            "Set [registry] url or ECHO_REGISTRY__URL; `echoswarm kafka up --registry` starts one on this machine.",
            ExitCode.USAGE,
        )
    namespace = Namespace(settings.kafka.namespace)
    subjects = subjects_of(namespace.topic)
    registry = HttpRegistry(settings.registry.url, subjects, settings.registry.client_properties())
    if only_check:
        _check_registered(registry)
        return
    levels = {record: spec.compatibility for spec in load_topic_specs() for record in spec.records}
    for schema in all_schemas():
        level = levels[schema.full_name.rpartition(".")[2]]
        schema_id = registry.register(schema, level)
        out.print(f"[green]{schema_id:>4}[/]  {', '.join(subjects[schema.full_name])}  [dim]{schema.name}.v{schema.version}, {level}[/]")


def _check_registered(registry: HttpRegistry) -> None:
    """Print what is not registered; changes nothing. Exits 3 if there is something."""
    missing = [(schema, subject, fits) for schema in all_schemas() for subject, fits in registry.missing(schema).items()]
    for schema, subject, fits in missing:
        says = "is not registered" if fits else "would be refused: it is not compatible with what is registered"
        out.print(f"[red]![/] {schema.name}.v{schema.version} {says} under {subject}.")
    if missing:
        sys.exit(ExitCode.DRIFT)
    out.print(f"[green]{len(all_schemas())} schemas are registered.[/]")
