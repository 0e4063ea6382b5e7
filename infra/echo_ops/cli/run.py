"""`echoswarm run ROLE`: one role in this process, until it is done or told to stop."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from confluent_kafka import KafkaException

from echo_bus.bus import Bus
from echo_bus.client.kafka_errors import translate
from echo_bus.clock import Deadline
from echo_bus.errors import ClusterUnreachable, TopicMissing
from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config, taking
from echo_ops.roles import ROLES, Flags, Role, arguments_of
from echo_runtime.garbage import without_collection
from echo_runtime.logs import LogFormat, set_up_logs
from echo_runtime.ownership import START_VARIABLE, await_turn
from echo_runtime.process import StopSignal, open_role
from echo_runtime.rights import check_rights
from echo_schemas.errors import EchoError
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs
from echo_settings import Settings
from echo_settings.kinds import settings_of_kind

logger = logging.getLogger(__name__)

# Time for a broker to start, and for its topics to be made.
TOPICS_S = 120.0
_ASK_S = 2.0
_ASK_EVERY_S = 0.1


@taking("flags", Flags)
def run_role(
    role: Annotated[Role, typer.Argument(help="Which role this process is.")],
    config: Config = None,
    name: Annotated[
        str | None, typer.Option(help="Tells processes of one role apart; keep a worker's or a reward's over restarts.")
    ] = None,
    announce: Annotated[Path | None, typer.Option(help="Write a JSON file with pid and metrics address once they are known.")] = None,
    log_file: Annotated[Path | None, typer.Option("--log-file", help="Log there instead of to standard error.")] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option("--log-format", help="json: one object a line. By default as [logs] format says.")
    ] = None,
    *,
    flags: Flags,
) -> None:
    """Import what the role needs (the slow part), wait for its topics and its turn, run it. Blocks until it ends.

    Raises UserError for flags of another role, and if another run owns the namespace; NotAuthorized for rights that the role lacks.
    """
    arguments = arguments_of(role, flags)
    settings = settings_of_kind(read_settings(config), flags.kind)
    process = f"{role.value}.{name}" if name else role.value
    form = log_format or settings.logs.format
    set_up_logs(log_file, form, run=settings.run.name, role=role.value, process=process, level=settings.logs.level)
    try:
        _run_role(role, settings, name=name, announce=announce, arguments=arguments)
    except EchoError as exc:
        first = first_error(exc)
        if form == "json":
            # The command line prints it as a sentence on standard error, too.
            logger.error("%s", first)  # noqa: TRY400  one sentence says all
        raise first from None


def first_error(exc: EchoError) -> EchoError:
    """What ended the role, where closing its clients failed, too: without brokers they cannot deliver what is left."""
    while exc.__cause__ is None and isinstance(exc.__context__, EchoError):
        exc = exc.__context__
    return exc


def _run_role(role: Role, settings: Settings, *, name: str | None, announce: Path | None, arguments: dict[str, Any]) -> None:
    entry = ROLES[role]
    # Check before the imports, which take seconds; check again after them if no broker answered.
    may_work = check_rights(settings, role.value)
    started_s = time.monotonic()
    with without_collection():
        function = entry.load(settings)
    logger.info("%s imported in %.1f s", role.value, time.monotonic() - started_s)
    with open_role(settings, role.value, name=name, announce=announce, start=os.environ.get(START_VARIABLE, "")) as process:
        if not wait_for_topics(process.bus, process.stop, Deadline.after(TOPICS_S)):
            return
        if not may_work:
            check_rights(settings, role.value)
        # The learner decides by itself which run owns the namespace. A worker waits later: its engine starts meanwhile.
        waits = entry.allocates or (role is Role.REWARD and bool(process.start))
        if role is not Role.LEARNER and not await_turn(process, needs_learner=waits):
            return
        if role is Role.WORKER:
            arguments["worker_id"] = name or f"worker-{socket.gethostname()}-{os.getpid()}"
        function(process, **arguments)
        has_drained = process.stop.is_set()
    if has_drained:
        _leave()


def _leave() -> None:
    """End a drained process at once. Everything is closed, and the interpreter's own exit takes seconds with an engine loaded."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def wait_for_topics(bus: Bus, stop: StopSignal, deadline: Deadline) -> bool:
    """Wait until every topic that the role of `bus` reads or writes is there; False if `stop` came first.

    At the deadline raises TopicMissing, or why no broker answered.
    """
    admin = bus.cluster.admin()
    wanted = topics_of(bus.role, bus.namespace)
    missing: set[str] | None = None
    cause: KafkaException | None = None
    while not stop.is_set():
        try:
            missing, cause = wanted - set(admin.list_topics(timeout=_ASK_S).topics), None
        except KafkaException as exc:
            cause = exc
        if missing is not None and not missing:
            return True
        if deadline.expired():
            if missing is None:
                raise translate(cause, "the configured address") if cause is not None else ClusterUnreachable("No broker answered in time.")
            raise TopicMissing(
                f"{len(missing)} topics are missing, {min(missing)!r} for one, or this login may not see them.",
                hint="Run `echoswarm topics apply`, and compare the login's access with `echoswarm acls render`.",
            )
        stop.wait(_ASK_EVERY_S)
    return False


def topics_of(role: str, namespace: Namespace) -> set[str]:
    """The topics that `role` (or `role.name`) reads and writes. A cluster with access lists shows its login no others."""
    kind = role.partition(".")[0]
    return {f"{namespace.name}.{spec.name}" for spec in load_topic_specs() if kind in {*spec.producers, *spec.consumers}}
