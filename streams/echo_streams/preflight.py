"""What must be true of the cluster before Faust starts: its own client would wait in silence for most of it."""

from __future__ import annotations

import logging

from confluent_kafka import KafkaError, KafkaException

from echo_bus.bus import Bus
from echo_bus.client.cluster import Cluster
from echo_bus.client.kafka import translate
from echo_bus.errors import NotAuthorized
from echo_schemas.errors import UserError
from echo_schemas.topics import REWARDS, TRAJECTORIES

logger = logging.getLogger(__name__)

_ASK_S = 15.0
# A broker that has just started may leave the first question after a group's coordinator unanswered, and answers the second at once.
_LOOK_S = 2.0
_NUM_LOOKS = 3


def check_topics(bus: Bus) -> int:
    """The number of partitions of `trajectories`. Raises UserError if a topic is missing or `rewards` has fewer partitions.

    Raises ClusterUnreachable or NotAuthorized as the cluster says.
    """
    space = bus.namespace
    trajectories, rewards, letters = space.topic(TRAJECTORIES), space.topic(REWARDS), space.dead_letters(TRAJECTORIES)
    admin = bus.cluster.admin()
    try:
        found = admin.list_topics(timeout=_ASK_S).topics
    except KafkaException as exc:
        raise translate(exc, f"the cluster of {space.name!r}") from exc
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


def check_group(cluster: Cluster, group: str) -> None:
    """Raises NotAuthorized if we may not even look at `group`: joining it would then hang without a word.

    Any other answer lets Faust try: the coordinator of a broker that has just started needs a while.
    """
    for _ in range(_NUM_LOOKS):
        # Kept in a variable: an admin client that is collected while its futures run cancels them.
        admin = cluster.admin()
        (described,) = admin.describe_consumer_groups([group], request_timeout=_LOOK_S).values()
        try:
            described.result(_LOOK_S + 1)
        except TimeoutError:
            continue
        except KafkaException as exc:
            code = exc.args[0].code()
            if code == KafkaError._TIMED_OUT:  # noqa: SLF001  the library's own name for it
                continue
            if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise not_allowed(group) from exc
            if code != KafkaError.GROUP_ID_NOT_FOUND:
                logger.warning("The group %s could not be looked at (%s)", group, exc.args[0].str())
        return
    logger.warning("The group %s could not be looked at within %g s", group, _NUM_LOOKS * _LOOK_S)


def not_allowed(group: str) -> NotAuthorized:
    """What to say when the group is closed to us."""
    return NotAuthorized(
        f"The reward application may not read as the consumer group {group!r}.",
        hint="It wants READ on the group; compare with `echoswarm acls render`.",
    )
