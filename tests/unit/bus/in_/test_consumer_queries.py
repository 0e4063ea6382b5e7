"""What a consumer asks of the cluster is asked again when a connection broke, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from echo_bus.client.consumer_queries import end_offsets, num_partitions
from echo_bus.errors import ClusterUnreachable, NotAuthorized, TopicMissing

TOPIC = "unit.drops"


class Client:
    """Fails so many times, then names three partitions."""

    def __init__(self, failures: int, code: int = KafkaError._TRANSPORT) -> None:
        self.failures = failures
        self._code = code

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self.failures:
            self.failures -= 1
            raise KafkaException(KafkaError(self._code))
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions={0: None, 1: None, 2: None}, error=None)})

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        if self.failures:
            self.failures -= 1
            raise KafkaException(KafkaError(self._code))
        return [TopicPartition(place.topic, place.partition, 7) for place in places]


def test_a_question_whose_connection_broke_is_asked_again() -> None:
    client: Any = Client(2)
    assert num_partitions(client, TOPIC) == 3
    assert client.failures == 0


def test_a_cluster_that_never_answers_is_named_at_the_deadline() -> None:
    client: Any = Client(1_000)
    with pytest.raises(ClusterUnreachable):
        num_partitions(client, TOPIC, 0.0)


def test_a_refusal_is_not_asked_again() -> None:
    client: Any = Client(2, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(NotAuthorized):
        num_partitions(client, TOPIC)
    assert client.failures == 1


@pytest.mark.parametrize("code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.OFFSET_NOT_AVAILABLE])
def test_a_leader_that_has_just_been_elected_is_asked_again(code: int) -> None:
    client: Any = Client(2, code)
    assert end_offsets(client, [(TOPIC, 1)]) == {(TOPIC, 1): 7}


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC])
def test_a_topic_that_the_client_does_not_know_yet_is_asked_for_again(code: int) -> None:
    """As right after it was created: the cluster names its partitions, and the client's own table lacks them for a moment."""
    client: Any = Client(2, code)
    client.list_topics = lambda topic, timeout: SimpleNamespace(topics={topic: SimpleNamespace(partitions={0: None, 1: None}, error=None)})
    assert end_offsets(client, [(TOPIC, 1)]) == {(TOPIC, 1): 7}


def test_a_partition_that_the_topic_does_not_have_is_missing() -> None:
    client: Any = Client(1_000, KafkaError._UNKNOWN_PARTITION)
    client.list_topics = lambda topic, timeout: SimpleNamespace(topics={topic: SimpleNamespace(partitions={0: None}, error=None)})
    with pytest.raises(TopicMissing, match=r"unit\.drops does not exist"):
        end_offsets(client, [(TOPIC, 1)])


@pytest.mark.parametrize(("code", "timeout_s"), [(KafkaError._UNKNOWN_PARTITION, 30.0), (KafkaError.UNKNOWN_TOPIC_OR_PART, 0.0)])
def test_a_topic_that_was_removed_meanwhile_is_missing(code: int, timeout_s: float) -> None:
    """As while a run is removed and its runs are listed."""
    client: Any = Client(1_000, code)
    client.list_topics = lambda topic, timeout: SimpleNamespace(topics={})
    with pytest.raises(TopicMissing, match=r"unit\.drops does not exist"):
        end_offsets(client, [(TOPIC, 1)], timeout_s)


def test_a_topic_that_the_client_has_forgotten_while_no_broker_answers_is_not_missing() -> None:
    client: Any = Client(1_000, KafkaError._UNKNOWN_PARTITION)

    def silent(topic: str, timeout: float) -> Any:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    client.list_topics = silent
    with pytest.raises(ClusterUnreachable, match="No broker answers"):
        end_offsets(client, [(TOPIC, 1)])
