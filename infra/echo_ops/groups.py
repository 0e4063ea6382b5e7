"""Consumer groups of the cluster and whether somebody is in them.

Asked of the brokers, not of a group's coordinator, where librdkafka may end the process: see `consumer_queries`.
"""

from __future__ import annotations

from confluent_kafka import ConsumerGroupState, KafkaException

from echo_bus.client.cluster import Cluster
from echo_bus.client.kafka import translate
from echo_bus.errors import ClusterUnreachable

_GROUPS_S = 10.0


def groups_with_members(cluster: Cluster) -> dict[str, bool]:
    """Group → whether it has members. Raises ClusterUnreachable, NotAuthorized."""
    # Held until the answer is there: with the client goes who would bring it.
    admin = cluster.admin()
    try:
        found = admin.list_consumer_groups(request_timeout=_GROUPS_S).result(_GROUPS_S).valid
    except TimeoutError as exc:
        raise ClusterUnreachable(f"Nobody said within {_GROUPS_S:g} s which groups there are.") from exc
    except KafkaException as exc:
        raise translate(exc, "the cluster") from exc
    return {each.group_id: each.state not in {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD} for each in found}


def has_members(cluster: Cluster, group: str) -> bool:
    """Whether somebody is in `group`. Raises as `groups_with_members`."""
    return groups_with_members(cluster).get(group, False)
