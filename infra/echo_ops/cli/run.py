"""`echoswarm run ROLE`: one role in this process, until it is done or told to stop."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.errors import ClusterUnreachable, TopicMissing
from echo_bus.kafka import translate
from echo_bus.ownership import START_VARIABLE, await_turn
from echo_bus.process import StopSignal, open_role, without_collection
from echo_bus.settings import Settings
from echo_bus.settings.kinds import settings_of_kind
from echo_ops.cli.context import read_settings
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs

logger = logging.getLogger(__name__)

# A broker that is being started, its topics after it.
TOPICS_S = 120.0
_ASK_S = 2.0
_ASK_EVERY_S = 0.1
_LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a role's code is, the extra that installs what it needs, and how its libraries are imported before it begins. `allocates`: it
    fences whoever did its work before and writes what others act on, so a learner must have accepted the run first.
    """

    module: str
    function: str
    extra: str
    prefetch: Callable[[Settings], None] = lambda settings: None
    allocates: bool = False


def _prefetch_engine(settings: Settings) -> None:
    from echo_rollout.engines.catalogue import prefetch

    prefetch(settings.rollout.engine)


def _prefetch_faust(settings: Settings) -> None:
    """While the learner comes up, which a reward process of `echoswarm up` waits for."""
    del settings
    importlib.import_module("echo_streams.faust_app")


_ENTRIES = {
    "worker": _Entry("echo_rollout.run", "run_worker", "rollout", _prefetch_engine),
    "feeder": _Entry("echo_rollout.run", "run_feeder", "rollout", allocates=True),
    "offline": _Entry("echo_rollout.offline.run", "run_offline", "rollout", allocates=True),
    "reward": _Entry("echo_streams.run", "run_reward", "streams", _prefetch_faust),
    "learner": _Entry("echo_learner.run", "run_learner", "learner"),
}


def run_role(role: str, config: Path | None, *, name: str | None, announce: Path | None, log_file: Path | None, **more: Any) -> None:
    """Import what the role needs (the slow part), wait for its topics, see whose namespace it is, run it. Blocks until it ends.

    `more`: the role's own arguments. Raises UserError where another run owns the namespace.
    """
    log_to(log_file)
    settings = settings_of_kind(read_settings(config), more.get("kind", ""))
    entry = _ENTRIES[role]
    started_s = time.monotonic()
    with without_collection():
        function = import_entry(entry, settings)
    logger.info("%s imported in %.1f s", role, time.monotonic() - started_s)
    with open_role(settings, role, name=name, announce=announce, start=os.environ.get(START_VARIABLE, "")) as process:
        if not wait_for_topics(process.bus, process.stop, Deadline.after(TOPICS_S)):
            return
        # The learner decides whose the namespace is, by itself. A worker has an engine to start, and waits later.
        waits = entry.allocates or (role == "reward" and bool(process.start))
        if role != "learner" and not await_turn(process, needs_learner=waits):
            return
        if role == "worker":
            more["worker_id"] = name or f"worker-{own_name()}"
        function(process, **more)
        has_drained = process.stop.is_set()
    if has_drained:
        _leave()


def _leave() -> None:
    """End a process that has drained. Everything is closed, and the interpreter's own way out takes seconds with an engine loaded."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def log_to(file: Path | None) -> None:
    """Everything at INFO to standard error, or to `file`."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, datefmt="%H:%M:%S", handlers=[handler], force=True)


def import_entry(entry: _Entry, settings: Settings) -> Callable[..., None]:
    """The role's function, its heavy libraries loaded. Raises UserError where one is not installed."""
    try:
        entry.prefetch(settings)
        function: Callable[..., None] = getattr(importlib.import_module(entry.module), entry.function)
    except ModuleNotFoundError as exc:
        raise UserError(
            f"This role needs the library {exc.name!r}, which is not installed here.", hint=f"pip install 'echoswarm[{entry.extra}]'"
        ) from exc
    return function


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
    """What the role called `role` (or `role.name`) reads and writes: a cluster shows a login no topic beyond those."""
    kind = role.partition(".")[0]
    return {f"{namespace.name}.{spec.name}" for spec in load_topic_specs() if kind in {*spec.producers, *spec.consumers}}


def own_name() -> str:
    """This host and process: tells workers of a pool apart that were given no name."""
    return f"{socket.gethostname()}-{os.getpid()}"
