"""What a group has committed is asked for again while its coordinator moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as ClientMessage

from echo_bus.client.consumer_queries import committed_offsets
from echo_bus.errors import ClusterUnreachable, NotAuthorized

PLACES = [("t", 0), ("t", 1)]


class Coordinated:
    """A consumer whose coordinator answers with `errors`, one after another, and then with what was committed."""

    def __init__(self, errors: Sequence[int]) -> None:
        self.errors = list(errors)
        self.repeats = False
        self.told: list[int] = []

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        assert timeout > 0
        if self.errors:
            raise KafkaException(KafkaError(self.errors[0] if self.repeats else self.errors.pop(0)))
        return [TopicPartition(place.topic, place.partition, 7 if place.partition == 0 else -1001) for place in partitions]

    def poll(self, timeout: float) -> Any:
        """What it was told beside its answers."""
        assert timeout == 0
        return ClientMessage(topic=None, error=KafkaError(self.told.pop(0))) if self.told else None


def ask(consumer: Any, timeout_s: float = 20.0) -> dict[tuple[str, int], int]:
    return committed_offsets(consumer, "g", PLACES, timeout_s)


def test_a_coordinator_that_moves_is_asked_again() -> None:
    moving = (
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._WAIT_COORD,
    )
    assert ask(Coordinated(moving)) == {("t", 0): 7}


def test_one_that_is_not_found_in_time_is_unreachable() -> None:
    lost = Coordinated([KafkaError.NOT_COORDINATOR])
    lost.repeats = True
    with pytest.raises(ClusterUnreachable, match="coordinator of the group that reads t"):
        ask(lost, timeout_s=0.2)


def test_a_refusal_is_final() -> None:
    with pytest.raises(NotAuthorized, match="DESCRIBE on the group g"):
        ask(Coordinated([KafkaError.GROUP_AUTHORIZATION_FAILED]))


def test_a_refusal_that_comes_beside_a_question_without_an_answer_is_heard() -> None:
    silent = Coordinated([KafkaError._TIMED_OUT])
    silent.repeats, silent.told = True, [KafkaError._ALL_BROKERS_DOWN, KafkaError.GROUP_AUTHORIZATION_FAILED]
    with pytest.raises(NotAuthorized, match="DESCRIBE on the group g"):
        ask(silent)


def test_an_answer_that_is_late_is_waited_for_longer() -> None:
    assert ask(Coordinated([KafkaError._TIMED_OUT] * 3)) == {("t", 0): 7}
