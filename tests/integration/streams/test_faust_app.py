"""The reward application's promises, on a stand-in for Faust that delivers, rebalances and breaks when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import GroupAuthorizationFailedError, KafkaConnectionError, TopicAuthorizationFailedError
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from prometheus_client import CollectorRegistry

from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.clock import SystemClock
from echo_bus.errors import ClusterUnreachable, DeadlineExceeded, NotAuthorized, TooManyDeadLetters, TransportError
from echo_runtime.places import PlaceTimes
from echo_runtime.process import StopSignal
from echo_streams import driver, faust_app
from echo_streams.faust_app import AppOptions, FaustMessage, RewardApp
from echo_streams.metrics import StreamsMetrics
from echo_streams.processing import Outgoing, Send
from echo_streams.security import Login
from tests.unit.streams.stage import sample

WAIT_S = 60.0
TOPIC = "unit.trajectories"
OPTIONS = AppOptions(
    group="unit.reward.main", client_id="unit.reward", bootstrap="127.0.0.1:1", topic=TOPIC, login=Login(), inline=True, joined_within_s=0.2
)


@dataclass
class Event:
    """A message of one partition, as Faust hands it to an agent."""

    offset: int
    generation_id: int = 1
    acked: bool = False
    message: Any = None

    def __post_init__(self) -> None:
        self.message = SimpleNamespace(topic=TOPIC, partition=0, offset=self.offset, key=b"k", value=b"v", headers=[("h", b"1")],
                                       generation_id=self.generation_id, timestamp=1.5, timestamp_type=0)  # fmt: skip

    def ack(self) -> None:
        self.acked = True


@dataclass
class FakeFaust:
    """What RewardApp uses of a Faust app. Deliveries wait for `deliver`; `trace` is the order of what was done."""

    consumer_generation_id: int = 1
    crashed: bool = False
    crash_reason: BaseException | None = None
    on_start: BaseException | None = None
    starts_without_end: bool = False
    events: list[Event] = field(default_factory=list)
    sent: list[tuple[Any, ...]] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    undelivered: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived = asyncio.Event()
        self.producer = self.consumer = self.channel = self
        self.assigned: set[Any] = {SimpleTP(TOPIC, 0)}

    def topic(self, name: str, **_: Any) -> str:
        return name

    def agent(self, source: str, *, name: str) -> Callable[[Any], None]:
        assert (source, name) == (TOPIC, "unit.reward.main.receive")
        return lambda receive: setattr(self, "receive", receive)

    async def start(self) -> None:
        if self.on_start is not None:
            raise self.on_start
        self.agent_task = asyncio.create_task(vars(self)["receive"](self))
        if self.starts_without_end:
            await asyncio.Event().wait()

    async def stop(self) -> None:
        self.trace.append("stop")
        if hasattr(self, "agent_task"):
            self.agent_task.cancel()

    def arrive(self, *events: Event) -> None:
        self.events += events
        self.arrived.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        position = 0
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            while position < len(self.events):
                position += 1
                yield self.events[position - 1]

    async def send(self, *record: Any) -> asyncio.Future[None]:
        self.sent.append(record)
        self.undelivered.append(asyncio.get_running_loop().create_future())
        return self.undelivered[-1]

    async def send_batch(self, topic: str, partition: int, records: Sequence[Any]) -> list[asyncio.Future[None]]:
        return [await self.send(topic, key, value, partition, None, headers) for key, value, headers in records]

    def deliver(self, error: Exception | None = None) -> None:
        for future in self.undelivered:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        self.undelivered.clear()

    async def commit(self) -> None:
        self.trace.append(f"commit {[event.offset for event in self.events if event.acked]}")

    def assignment(self) -> set[Any]:
        return self.assigned

    def highwater(self, _: Any) -> int:
        return 10


@dataclass(frozen=True, order=True)
class SimpleTP:
    topic: str
    partition: int


async def answer(batch: Sequence[RawMessage], _: Send) -> list[Outgoing]:
    """One record per message, on its partition."""
    return [Outgoing("unit.rewards", raw.partition(), raw.key(), b"reward", [("n", str(raw.offset()).encode())]) for raw in batch]


class Stage:
    """An application on the stand-in, running until the test has set `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: faust_app.Process = answer, **faust: Any) -> None:
        self.faust = FakeFaust(**faust)
        monkeypatch.setattr(faust_app, "_faust_app", lambda options: self.faust)
        self.metrics = StreamsMetrics()
        self.stop = StopSignal()
        places = PlaceTimes(CollectorRegistry(), SystemClock())
        self.app = RewardApp(OPTIONS, process, metrics=self.metrics, places=places, clock=SystemClock())
        self.running = asyncio.create_task(self.app.run(self.stop))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"waited for {what}; sent {len(self.faust.sent)}, {self.faust.trace}")

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(WAIT_S):
            await self.running


def test_a_message_is_acknowledged_after_its_answer_is_delivered_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        stage.faust.arrive(*(Event(offset) for offset in range(3)))
        await stage.until(lambda: len(stage.faust.undelivered) == 3, "three answers on their way")
        assert not any(event.acked for event in stage.faust.events)
        assert stage.metrics.registry.get_sample_value("echo_streams_in_flight") == 3
        stage.faust.deliver()
        await stage.until(lambda: all(event.acked for event in stage.faust.events), "acknowledgements")
        await stage.end()
        assert stage.faust.trace == ["commit [0, 1, 2]", "stop"]
        assert stage.faust.sent[1] == ("unit.rewards", b"k", b"reward", 0, None, [("n", b"1")])
        assert sample(stage.metrics, "echo_streams_trajectories_total") == 3
        assert sample(stage.metrics, "echo_streams_in_flight") == 0

    asyncio.run(run())


def test_a_message_is_acknowledged_after_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faust would commit behind a message whose answer is delivered first, and a crash would then lose those before it."""

    async def run() -> None:
        stage = Stage(monkeypatch)
        for offset in range(3):
            stage.faust.arrive(Event(offset))
            await stage.until(lambda: len(stage.faust.undelivered) == offset + 1, "an answer on its way")  # noqa: B023  called within the round
        first, second, third = stage.faust.undelivered
        second.set_result(None)
        await stage.until(lambda: sample(stage.metrics, "echo_streams_trajectories_total") == 1, "the second answer to be delivered")
        assert not any(event.acked for event in stage.faust.events)
        first.set_result(None)
        await stage.until(lambda: [event.acked for event in stage.faust.events] == [True, True, False], "two acknowledgements")
        third.set_result(None)
        await stage.until(lambda: stage.faust.events[2].acked, "the third acknowledgement")
        await stage.end()

    asyncio.run(run())


def test_an_answer_that_cannot_be_delivered_ends_the_application_and_acknowledges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        stage.faust.arrive(Event(0), Event(1))
        await stage.until(lambda: len(stage.faust.undelivered) == 2, "two answers on their way")
        stage.faust.deliver(KafkaConnectionError("no broker"))
        with pytest.raises(ClusterUnreachable, match=r"gave up: .*no broker.*nothing is lost"):
            await asyncio.wait_for(stage.running, WAIT_S)
        assert not any(event.acked for event in stage.faust.events)
        assert stage.faust.trace == ["stop"]

    asyncio.run(run())


def test_after_a_rebalance_nothing_of_the_earlier_generation_is_acknowledged_or_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        stage.faust.arrive(Event(0))
        await stage.until(lambda: len(stage.faust.undelivered) == 1, "an answer on its way")
        stage.faust.consumer_generation_id = 2
        stage.faust.deliver()
        stage.faust.arrive(Event(1, generation_id=1), Event(2, generation_id=2))
        await stage.until(lambda: len(stage.faust.undelivered) == 1, "the answer of the new generation")
        stage.faust.deliver()
        await stage.until(lambda: stage.faust.events[2].acked, "its acknowledgement")
        await stage.end()
        assert [event.acked for event in stage.faust.events] == [False, False, True]
        assert [record[5][0][1] for record in stage.faust.sent] == [b"0", b"2"]

    asyncio.run(run())


def test_draining_finishes_what_was_read_and_reads_no_more(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        stage.faust.arrive(Event(0))
        await stage.until(lambda: len(stage.faust.undelivered) == 1, "an answer on its way")
        stage.stop.set()
        await stage.until(lambda: "Draining: 1 trajectories" in caplog.text, "draining")
        stage.faust.arrive(Event(1))
        await stage.until(lambda: not stage.faust.arrived.is_set(), "the agent to pass over what came late")
        assert stage.faust.trace == []
        stage.faust.deliver()
        await stage.end()
        assert stage.faust.trace == ["commit [0]", "stop"]
        assert len(stage.faust.sent) == 1

    with caplog.at_level("INFO", "echo_streams.faust_app"):
        asyncio.run(run())


def test_a_batch_without_answers_is_acknowledged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_: Sequence[RawMessage], __: Send) -> list[Outgoing]:
        return []

    async def run() -> None:
        stage = Stage(monkeypatch, nothing)
        stage.faust.arrive(Event(0))
        await stage.until(lambda: stage.faust.events[0].acked, "an acknowledgement")
        await stage.end()

    asyncio.run(run())


def test_what_the_processor_raises_ends_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(_: Sequence[RawMessage], __: Send) -> list[Outgoing]:
        raise TooManyDeadLetters("100 messages in a row were invalid")

    async def run() -> None:
        stage = Stage(monkeypatch, refuses)
        stage.faust.arrive(Event(0))
        with pytest.raises(TooManyDeadLetters):
            await asyncio.wait_for(stage.running, WAIT_S)
        assert not stage.faust.events[0].acked

    asyncio.run(run())


def test_a_group_that_lets_nobody_in_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch, consumer_generation_id=0)
        assert not stage.app.joined
        with pytest.raises(DeadlineExceeded, match=r"'unit.reward.main' did not let us in within 0\.2 s\..*READ on the group"):
            await asyncio.wait_for(stage.running, WAIT_S)
        # Faust's start ends only when the group has been joined.
        stage = Stage(monkeypatch, consumer_generation_id=0, starts_without_end=True)
        with pytest.raises(DeadlineExceeded, match="did not let us in"):
            await asyncio.wait_for(stage.running, WAIT_S)
        assert stage.faust.trace == ["stop"]

    asyncio.run(run())


def test_one_that_waits_for_its_group_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch, consumer_generation_id=0, starts_without_end=True)
        await stage.until(lambda: hasattr(stage.faust, "agent_task"), "its start")
        await stage.end()
        assert stage.faust.trace == ["stop"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reason", "error", "sentence"),
    [
        (GroupAuthorizationFailedError("unit.reward.main"), NotAuthorized, "refuses this login READ on the group unit.reward.main"),
        (TopicAuthorizationFailedError(TOPIC), NotAuthorized, "does not allow this.*acls render"),
        (KafkaConnectionError("no broker"), ClusterUnreachable, "gave up.*no broker"),
        (None, TransportError, "ended without a reason"),
        (ValueError("a bug of ours"), ValueError, "a bug of ours"),
    ],
)
def test_a_client_that_breaks_is_explained(
    monkeypatch: pytest.MonkeyPatch, reason: Exception | None, error: type[Exception], sentence: str
) -> None:
    async def run() -> None:
        moments: list[dict[str, Any]] = [{"crashed": True, "crash_reason": reason}]
        if reason is not None:
            moments.append({"on_start": reason})
        for moment in moments:
            stage = Stage(monkeypatch, **moment)
            with pytest.raises(error, match=sentence):
                await asyncio.wait_for(stage.running, WAIT_S)

    asyncio.run(run())


def test_partitions_and_lag_are_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        stage.faust.arrive(Event(6))
        await stage.until(lambda: bool(stage.faust.undelivered), "an answer on its way")
        stage.faust.deliver()
        await stage.until(lambda: sample(stage.metrics, "echo_streams_lag", partition="0") == 3, "the lag behind offset 10")
        assert sample(stage.metrics, "echo_streams_partitions_assigned") == 1
        stage.faust.assigned = set()
        await stage.until(lambda: sample(stage.metrics, "echo_streams_lag", partition="0") == 0, "another member's lag to be told no more")
        await stage.end()

    with caplog.at_level("INFO", "echo_streams.faust_app"):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("Reading")] == [
        f"Reading {TOPIC}[0]",
        "Reading no partition: others have them all",
    ]


@pytest.mark.parametrize("headers", [[("a", b"1")], {"a": b"1"}, None])
def test_a_message_of_faust_reads_like_one_of_confluent_kafka(headers: Any) -> None:
    event = Event(7)
    event.message.headers = headers
    message = FaustMessage(event.message)
    assert (message.topic(), message.partition(), message.offset()) == (TOPIC, 0, 7)
    assert (message.key(), message.value(), len(message), message.latency()) == (b"k", b"v", 1, None)
    assert message.headers() == ([("a", b"1")] if headers else [])
    assert message.timestamp() == (0, 1500)


def test_the_client_waits_little_for_empty_partitions_and_reads_what_was_committed() -> None:
    """Names that aiokafka could change without a word."""

    async def run() -> tuple[Any, Any]:
        made = RewardApp(
            replace(OPTIONS, gather=True, static_member="r1"),
            answer,
            metrics=StreamsMetrics(),
            places=PlaceTimes(CollectorRegistry(), SystemClock()),
            clock=SystemClock(),
        )
        faust = made._app
        thread = faust.consumer._thread
        assert type(thread) is driver.ConsumerThread
        assert (type(faust.tables), faust.fixups) == (driver.TableManager, [])
        clients = (thread._create_worker_consumer(faust.transport), AIOKafkaConsumerThread._create_worker_consumer(thread, faust.transport))
        for client in clients:
            await client.stop()
        # Closed by the thread's end, but it was never started.
        thread.thread_loop.close()
        return clients

    ours, plain = asyncio.run(run())
    assert vars(ours).keys() == vars(plain).keys()
    assert (ours._fetch_min_bytes, plain._fetch_min_bytes) == (profiles.GATHERING_MIN_BYTES, 1)
    assert (ours._fetch_max_wait_ms, ours._isolation_level) == (driver.FETCH_WAIT_MS, "read_committed")
    assert ours._group_instance_id == "r1"
    assert (plain._fetch_max_wait_ms, plain._isolation_level) == (1500, "read_uncommitted")


def test_a_frozen_broker_holds_rewards_for_seconds_and_a_batch_lives_for_minutes() -> None:
    async def answer(_: Sequence[RawMessage], __: Send) -> list[Outgoing]:
        return []

    async def run() -> tuple[Any, Any]:
        made = RewardApp(
            OPTIONS, answer, metrics=StreamsMetrics(), places=PlaceTimes(CollectorRegistry(), SystemClock()), clock=SystemClock()
        )  # fmt: skip
        faust = made._app
        producer = faust.producer
        assert type(producer) is driver.Producer
        ours, plain = producer._new_producer(), AIOKafkaProducer(bootstrap_servers=OPTIONS.bootstrap)
        faust.consumer._thread.thread_loop.close()
        for client in (ours, plain):
            await client.stop()
        return ours, plain

    ours, plain = asyncio.run(run())
    # Every answer says how long the broker holds this client back.
    assert vars(ours.client).keys() == vars(plain.client).keys() | {"send"}
    assert ours.client._request_timeout_ms == driver.PRODUCE_ANSWER_MS == profiles.PRODUCER_LATENCY["request.timeout.ms"]
    assert ours._message_accumulator._batch_ttl * 1000 == profiles.PRODUCER_LATENCY["delivery.timeout.ms"]
