"""Requests to the cluster: a topic's number of partitions, a partition's first and last offsets, a group's committed offsets.

Never ask an admin client for a group's offsets or members: if the coordinator moves or its connection is lost, librdkafka (2.16) ends the
whole process (librdkafka#5040, librdkafka#5397), even a minute after the request has timed out.

Leaders and coordinators move, and are unknown for a moment after a topic or a group was created: such requests are repeated until the
time-out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from echo_bus.client.cluster import Cluster, RawConsumer, RawProducer
from echo_bus.client.kafka_errors import MISSING, missing, refused, translate
from echo_bus.client.profiles import GROUP_CONSUMER
from echo_bus.clock import Deadline
from echo_bus.errors import ClusterUnreachable, TopicMissing
from echo_schemas.rights import Resource

QUERY_S = 30.0
_AGAIN_S = 0.05
_ASK_AGAIN_S = 5.0
# The asker waits this long before it looks for a refusal, then twice as long each time, so that a slow answer still arrives.
_FIRST_WAIT_S = 0.25
_NO_ANSWER = KafkaError._TIMED_OUT  # noqa: SLF001  public in librdkafka, underscored in Python
_CONNECTION_LOST = KafkaError._TRANSPORT  # noqa: SLF001  see above
_PASSING = frozenset(
    {
        _CONNECTION_LOST,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        # A leader that has just been elected does not know yet how far its followers are.
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
)
_UNKNOWN_HERE = frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})  # noqa: SLF001  see above
_COORDINATOR_MOVES = frozenset(
    {
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._WAIT_COORD,  # noqa: SLF001  public in librdkafka, underscored in Python
    }
)


def open_asker(cluster: Cluster, group: str, client_id: str) -> RawConsumer:
    """A client for reading the committed offsets of `group`. It never joins the group; close it."""
    properties = {name: value for name, value in GROUP_CONSUMER.items() if name != "partition.assignment.strategy"}
    return cluster.consumer({**properties, "group.id": group, "client.id": client_id})


def num_partitions(client: RawConsumer | RawProducer, physical: str, timeout_s: float = QUERY_S) -> int:
    """How many partitions a topic has. Raises TopicMissing, ClusterUnreachable, NotAuthorized."""
    deadline = Deadline.after(timeout_s)
    while True:
        try:
            found = client.list_topics(physical, timeout=max(_AGAIN_S, deadline.remaining_s())).topics.get(physical)
            break
        except KafkaException as exc:
            # The client drops a connection that is not set up in time, together with its requests, and opens another.
            if exc.args[0].code() != _CONNECTION_LOST or deadline.expired():
                raise translate(exc, physical) from exc
            time.sleep(_AGAIN_S)
    if found is not None and found.error is not None and found.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise refused("Describe", Resource.TOPIC, physical)
    if found is None or not found.partitions:
        raise TopicMissing(f"The topic {physical} does not exist.", hint="Run `echoswarm topics apply`.")
    return len(found.partitions)


def watermarks(
    consumer: RawConsumer, places: Sequence[tuple[str, int]], timeout_s: float = QUERY_S
) -> dict[tuple[str, int], tuple[int, int]]:
    """The first offset of each (topic, partition), and the offset after its last record; two requests per leader.

    Not one request per partition: a broker answers a connection's requests in order, so each would wait up to half a second behind a fetch.
    Raises ClusterUnreachable, NotAuthorized, TopicMissing.
    """
    deadline = Deadline.after(timeout_s)
    lows = _offsets(consumer, places, OFFSET_BEGINNING, deadline)
    highs = _offsets(consumer, places, OFFSET_END, deadline)
    return {place: (lows[place], highs[place]) for place in places}


def end_offsets(consumer: RawConsumer, places: Sequence[tuple[str, int]], timeout_s: float = QUERY_S) -> dict[tuple[str, int], int]:
    """The offset after the last record of each (topic, partition); as `watermarks`."""
    return _offsets(consumer, places, OFFSET_END, Deadline.after(timeout_s))


def offsets_at(
    consumer: RawConsumer, places: Sequence[tuple[str, int]], time_ms: int, timeout_s: float = QUERY_S
) -> dict[tuple[str, int], int]:
    """The first offset of each (topic, partition) whose record is not older than `time_ms`, -1 if all are older; as `watermarks`."""
    return _offsets(consumer, places, time_ms, Deadline.after(timeout_s))


def committed_offsets(
    asker: RawConsumer, group: str, places: Sequence[tuple[str, int]], timeout_s: float = QUERY_S
) -> dict[tuple[str, int], int]:
    """The committed offsets of `group`; places without one are left out. `asker`: from `open_asker`. Raises as `committed`."""
    found = committed(asker, places, timeout_s, asks_for=group)
    return {(place.topic, place.partition): place.offset for place in found if place.offset >= 0}


def committed(
    consumer: RawConsumer, places: Sequence[tuple[str, int]], timeout_s: float = QUERY_S, *, asks_for: str = ""
) -> list[TopicPartition]:
    """The offsets that the consumer's group has committed, with their notes. One request to the group's coordinator.

    `asks_for`: the group, if `consumer` is from `open_asker`. Such a client gets a refusal as a message, and no answer to the request.
    Raises NotAuthorized, and ClusterUnreachable, also if no coordinator was found in time.
    """
    deadline = Deadline.after(timeout_s)
    wait_s = _FIRST_WAIT_S if asks_for else timeout_s
    while True:
        try:
            return consumer.committed(
                [TopicPartition(*place) for place in places], timeout=max(_AGAIN_S, min(wait_s, deadline.remaining_s()))
            )
        except KafkaException as exc:
            where = ", ".join(sorted({physical for physical, _ in places}))
            code = exc.args[0].code()
            if asks_for:
                if code == KafkaError.GROUP_AUTHORIZATION_FAILED or _hears_refusal(consumer):
                    raise refused("Describe", Resource.GROUP, asks_for) from exc
                wait_s *= 2
                if code == _NO_ANSWER and not deadline.expired():
                    continue
            if code not in _COORDINATOR_MOVES:
                raise translate(exc, where) from exc
            if deadline.expired():
                raise ClusterUnreachable(
                    f"The coordinator of the group that reads {where} has not been found for {timeout_s:g} s: {exc.args[0].str()}.",
                    hint="It moves while a broker starts or stops; ask again.",
                ) from exc
            time.sleep(_AGAIN_S)


def _hears_refusal(asker: RawConsumer) -> bool:
    """Whether the cluster has refused the client its group."""
    message = asker.poll(0)
    error = None if message is None else message.error()
    return error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED


def _offsets(consumer: RawConsumer, places: Sequence[tuple[str, int]], which: int, deadline: Deadline) -> dict[tuple[str, int], int]:
    """`which`: a time (Unix, ms), OFFSET_BEGINNING or OFFSET_END."""
    asked = [TopicPartition(physical, partition, which) for physical, partition in places]
    while True:
        try:
            found = consumer.offsets_for_times(asked, timeout=max(_AGAIN_S, deadline.remaining_s()))
            for answer in found:
                if answer.error is not None:
                    raise KafkaException(answer.error)
            return {(answer.topic, answer.partition): answer.offset for answer in found}
        except KafkaException as exc:
            error, where = exc.args[0], ", ".join(sorted({physical for physical, _ in places}))
            forgotten = error.code() in _UNKNOWN_HERE and _exist(consumer, places)
            if (error.code() not in _PASSING and not forgotten) or deadline.expired():
                # Missing: removed after its partitions were counted.
                raise (missing(where, error) if error.code() in MISSING else translate(exc, where)) from exc
            time.sleep(_AGAIN_S)


def _exist(consumer: RawConsumer, places: Sequence[tuple[str, int]]) -> bool:
    """Whether the cluster has these partitions: a client forgets topics while no broker answers, and learns of new ones piece by piece.

    Raises TopicMissing, ClusterUnreachable, NotAuthorized.
    """
    counts = {physical: num_partitions(consumer, physical, _ASK_AGAIN_S) for physical in {physical for physical, _ in places}}
    return all(partition < counts[physical] for physical, partition in places)
