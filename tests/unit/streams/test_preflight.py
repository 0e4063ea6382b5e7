"""A look at the reward application's group, on a cluster that leaves questions unanswered."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from echo_bus.client.cluster import Cluster
from echo_bus.errors import NotAuthorized
from echo_streams.preflight import check_group

GROUP = "echo.reward.main"


class Answers:
    """A cluster, and its admin client, that answers the n-th look with the n-th code; None: the group is there."""

    def __init__(self, *codes: int | None) -> None:
        self._codes = iter(codes)
        self.num_looks = 0

    def admin(self) -> Answers:
        return self

    def describe_consumer_groups(self, groups: list[str], *, request_timeout: float) -> dict[str, Future[Any]]:
        self.num_looks += 1
        code, answer = next(self._codes), Future[Any]()
        if code is None:
            answer.set_result(object())
        else:
            answer.set_exception(KafkaException(KafkaError(code)))
        return {groups[0]: answer}


def look(*codes: int | None) -> int:
    answers = Answers(*codes)
    check_group(cast("Cluster", answers), GROUP)
    return answers.num_looks


def test_a_question_that_is_not_answered_is_asked_again() -> None:
    assert look(KafkaError._TIMED_OUT, None) == 2
    with pytest.raises(NotAuthorized, match=GROUP):
        look(KafkaError._TIMED_OUT, KafkaError.GROUP_AUTHORIZATION_FAILED)


def test_a_group_that_never_answers_is_left_to_faust(caplog: pytest.LogCaptureFixture) -> None:
    assert look(*[KafkaError._TIMED_OUT] * 3) == 3
    assert "could not be looked at" in caplog.text


@pytest.mark.parametrize("code", [None, KafkaError.GROUP_ID_NOT_FOUND, KafkaError.COORDINATOR_NOT_AVAILABLE])
def test_any_other_answer_is_enough(code: int | None) -> None:
    assert look(code) == 1
