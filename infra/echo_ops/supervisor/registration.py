"""What is done once on the cluster before a run begins: nobody else owns its namespace, and its topics are as the files say."""

from __future__ import annotations

from contextlib import suppress

from confluent_kafka import KafkaException

from echo_bus.bus import Bus
from echo_bus.errors import TopicMissing
from echo_bus.kafka import KafkaCluster
from echo_learner.commit.session import read_tip, refuse_if_alive
from echo_ops.topic_admin import TopicAdmin
from echo_ops.topic_plan import summarise
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace

_REACH_S = 30.0
_COORDINATOR_S = 1.0


def refuse_if_owned(cluster: KafkaCluster, bus: Bus, run_id: str, *, takeover: bool) -> None:
    """Raise UserError if a learner is alive in the namespace of `bus`, before a process of ours has joined, fenced or written anything.

    `takeover`: one of the same run may be. Raises TransportError. The learner and the other roles look again, each for itself.
    """
    cluster.check(_REACH_S)
    try:
        claim = read_tip(bus, run_id).claim
    except TopicMissing:
        return
    refuse_if_alive(bus, claim, run_id=run_id, takeover=takeover)


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
