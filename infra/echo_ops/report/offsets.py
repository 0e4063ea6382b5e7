"""End offsets of topics and groups' committed offsets, with a few requests for all partitions together.

It uses consumers, not an admin client: see `consumer_queries`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from confluent_kafka import KafkaException

from echo_bus.client.cluster import Cluster, RawConsumer
from echo_bus.client.consumer_queries import committed_offsets, end_offsets, num_partitions, offsets_at, open_asker
from echo_bus.client.kafka_errors import translated
from echo_bus.client.profiles import LOOK
from echo_bus.errors import TransportError
from echo_bus.requests.dispatch import WORKERS_GROUP
from echo_schemas.naming import Namespace
from echo_schemas.topics import REQUESTS, TRAJECTORIES, Topic

_TIMEOUT_S = 15.0
_ROLE = "view"


class OffsetWatch:
    """Asks one cluster. Not thread-safe; `close` it. Every method raises TransportError if the cluster does not answer."""

    def __init__(self, cluster: Cluster, namespace: Namespace) -> None:
        self._cluster = cluster
        self._admin = cluster.admin()
        self._namespace = namespace
        self._client_id = namespace.client_id(_ROLE)
        self._log = cluster.consumer({**LOOK, "client.id": self._client_id})
        self._groups: dict[str, RawConsumer] = {}
        self._places: dict[str, list[tuple[str, int]]] = {}

    def ends(self, topic: Topic) -> int:
        """The sum of the partitions' end offsets: the number of records ever written to a topic without transactions."""
        return sum(self._ends(topic).values())

    def written_before(self, topic: Topic, time_ms: int) -> int:
        """The same at `time_ms` (Unix)."""
        first_since = offsets_at(self._log, self._places_of(topic), time_ms, _TIMEOUT_S)
        ends = self._ends(topic)
        return sum(ends[place] if offset < 0 else offset for place, offset in first_since.items())

    def lags(self, shadows: Collection[str] = ()) -> dict[str, int]:
        """Unfinished requests, and unscored trajectories of the slowest reward application, without the applications `shadows`."""
        with translated("the cluster"):
            groups = [group.group_id for group in self._admin.list_consumer_groups(request_timeout=_TIMEOUT_S).result().valid]
        rewards = self._namespace.group("reward")
        unawaited = {f"{rewards}.{name}" for name in shadows}
        scoring = [group for group in groups if (group == rewards or group.startswith(f"{rewards}.")) and group not in unawaited]
        lags = {}
        worker = self._namespace.group(WORKERS_GROUP)
        if worker in groups:
            lags["requests open"] = self.lag(worker, REQUESTS)
        if scoring:
            lags["not yet scored"] = max(self.lag(group, TRAJECTORIES) for group in scoring)
        return lags

    def lag(self, group: str, topic: Topic) -> int:
        """Records of `topic` that `group` has not committed."""
        ends = self._ends(topic)
        committed = committed_offsets(self._member_of(group), group, self._places_of(topic), _TIMEOUT_S)
        return sum(max(0, end - committed.get(place, 0)) for place, end in ends.items())

    def close(self) -> None:
        for consumer in (self._log, *self._groups.values()):
            with suppress(TransportError, KafkaException):
                consumer.close()

    def _member_of(self, group: str) -> RawConsumer:
        """A client for the group's offsets; it does not join the group."""
        if group not in self._groups:
            self._groups[group] = open_asker(self._cluster, group, self._client_id)
        return self._groups[group]

    def _ends(self, topic: Topic) -> dict[tuple[str, int], int]:
        return end_offsets(self._log, self._places_of(topic), _TIMEOUT_S)

    def _places_of(self, topic: Topic) -> list[tuple[str, int]]:
        physical = self._namespace.topic(topic)
        if physical not in self._places:
            count = num_partitions(self._log, physical, _TIMEOUT_S)
            self._places[physical] = [(physical, partition) for partition in range(count)]
        return self._places[physical]
