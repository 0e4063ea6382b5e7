"""Checks the topics before Faust starts, whose own client would wait silently for missing ones."""

from __future__ import annotations

from echo_bus.bus import Bus
from echo_bus.client.kafka_errors import translated
from echo_schemas.errors import UserError
from echo_schemas.topics import REWARDS, TRAJECTORIES

_ASK_S = 15.0


def check_topics(bus: Bus) -> int:
    """The number of partitions of `trajectories`. Raises UserError if a topic is missing or `rewards` has fewer partitions.

    Raises ClusterUnreachable or NotAuthorized.
    """
    space = bus.namespace
    trajectories, rewards, letters = space.topic(TRAJECTORIES), space.topic(REWARDS), space.dead_letters(TRAJECTORIES)
    admin = bus.cluster.admin()
    with translated(f"the cluster of {space.name!r}"):
        found = admin.list_topics(timeout=_ASK_S).topics
    missing = [topic for topic in (trajectories, rewards, letters) if topic not in found or found[topic].error is not None]
    if missing:
        raise UserError(
            f"The reward application cannot see the topics {', '.join(missing)}.",
            hint="Run `echoswarm topics apply`; if they exist, compare the rights with `echoswarm acls render`.",
        )
    num_read, num_written = len(found[trajectories].partitions), len(found[rewards].partitions)
    if num_written < num_read:
        raise UserError(
            f"{rewards} has {num_written} partitions and {trajectories} {num_read}: a reward lies on its trajectory's partition.",
            hint=f"Give {rewards} {num_read} partitions.",
        )
    return num_read
