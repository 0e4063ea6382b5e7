"""Consumer groups of the cluster, and whether they have members.

Every broker is asked, not a group's coordinator, since librdkafka may end the process there: see `consumer_queries`.
"""

from __future__ import annotations

from confluent_kafka import ConsumerGroupState, KafkaException

from echo_bus.client.cluster import Cluster
from echo_bus.client.kafka_errors import translate
from echo_bus.errors import ClusterUnreachable

_GROUPS_S = 10.0


def groups_with_members(cluster: Cluster) -> dict[str, bool]:
    """Group → whether it has members. Raises ClusterUnreachable, NotAuthorized."""
    # Keep the client in a variable: one that is collected cancels its request.
    admin = cluster.admin()
    try:
        found = admin.list_consumer_groups(request_timeout=_GROUPS_S).result(_GROUPS_S).valid
    except TimeoutError as exc:
        raise ClusterUnreachable(f"No broker listed the consumer groups within {_GROUPS_S:g} s.") from exc
    except KafkaException as exc:
        raise translate(exc, "the cluster") from exc
    return {each.group_id: each.state not in {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD} for each in found}


def has_members(cluster: Cluster, group: str) -> bool:
    """Whether `group` has members. Raises as `groups_with_members`."""
    return groups_with_members(cluster).get(group, False)
