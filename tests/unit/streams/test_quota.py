"""What the brokers' answers say and Faust's client does not tell: a quota that holds it back, refused commits, a place that is taken."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.errors import RebalanceInProgressError, RequestTimedOutError, UnknownMemberIdError, for_code
from aiokafka.protocol.commit import OffsetCommitRequest
from confluent_kafka import KafkaError
from prometheus_client import CollectorRegistry

from echo_bus.clock import ManualClock
from echo_bus.metrics import BusMetrics
from echo_runtime.notices import Notices
from echo_runtime.opening import throttle_report
from echo_streams.driver import App, _watch_answers


@dataclass
class Answer:
    """Of a broker to a fetch or a produce request."""

    throttle_time_ms: int


class Client:
    """aiokafka's client, as far as it is watched."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def send(self, node: int, request: str, *, group: int = 0) -> Any:
        assert (node, group) == (1, 2)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Listener:
    """The application that is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []
        self.commits: list[bool] = []

    def on_throttle(self, kind: str, seconds: float) -> None:
        self.heard.append((kind, seconds))

    def on_commit(self, is_accepted: bool) -> None:
        self.commits.append(is_accepted)


def test_answers_that_were_held_back_are_told_and_passed_on() -> None:
    answers = [Answer(0), Answer(1500), None, object()]
    client, listener = Client(*answers), Listener()
    _watch_answers(client, "consumer", cast("App", listener))

    async def ask() -> list[Any]:
        return [await client.send(1, "fetch", group=2) for _ in answers]

    assert asyncio.run(ask()) == answers
    assert listener.heard == [("consumer", 1.5)]


def test_what_became_of_commits_is_told() -> None:
    def answer(*codes: int) -> SimpleNamespace:
        return SimpleNamespace(topics=[("demo.trajectories", list(enumerate(codes)))])

    client, listener = Client(answer(0, 0), answer(0, 27), RequestTimedOutError(), answer(0)), Listener()
    _watch_answers(client, "consumer", cast("App", listener))

    async def ask() -> None:
        await client.send(1, OffsetCommitRequest("group", 1, "member", 0, []), group=2)
        await client.send(1, OffsetCommitRequest("group", 1, "member", 0, []), group=2)
        with pytest.raises(RequestTimedOutError):
            await client.send(1, OffsetCommitRequest("group", 1, "member", 0, []), group=2)
        await client.send(1, "fetch", group=2)

    asyncio.run(ask())
    assert listener.commits == [True, False, False]


@pytest.mark.parametrize(("kind", "sentence"), [("producer", "a larger producer_byte_rate"), ("admin", "a larger request_percentage")])
def test_a_quota_is_counted_and_said_while_it_holds_back(kind: str, sentence: str) -> None:
    clock = ManualClock()
    metrics, notices = BusMetrics(CollectorRegistry()), Notices(clock)
    report = throttle_report(metrics, notices)
    report(kind, 0.05)
    assert notices.current() == {}
    report(kind, 2.0)
    assert sentence in notices.current()[f"quota of its {kind}s"]
    assert metrics.registry.get_sample_value("echo_bus_throttled_seconds_total", {"client": kind}) == 2.05
    clock.advance(61)
    assert notices.current() == {}


def test_a_member_whose_place_is_taken_joins_again_and_does_not_end_with_an_unknown_error() -> None:
    taken, rebalance = SimpleNamespace(error_code=KafkaError.FENCED_INSTANCE_ID), SimpleNamespace(error_code=27)
    client = Client(taken, rebalance)
    _watch_answers(client, "consumer", cast("App", Listener()))

    async def ask() -> list[Any]:
        return [for_code((await client.send(1, "fetch", group=2)).error_code) for _ in range(2)]

    assert asyncio.run(ask()) == [UnknownMemberIdError, RebalanceInProgressError]
