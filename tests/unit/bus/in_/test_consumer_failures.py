"""The failure paths of the consumer loop that a healthy cluster does not show; in memory, with faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as ClientMessage
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.client.kafka_errors import check_error
from echo_bus.client.profiles import group_properties
from echo_bus.client.publisher import Publisher
from echo_bus.clock import SystemClock
from echo_bus.errors import DeliveryFailed, MemberReplaced, NotAuthorized, OffsetLost, TopicMissing, TransportError
from echo_bus.group.consumer import ConsumerLoop
from echo_bus.group.state import LoopLimits
from echo_bus.message import ACCEPTED, BUSY, Accepted, Completion, Handler, Invalid, Message, Outcome
from echo_bus.metrics import BusMetrics
from echo_bus.wire import Wire
from echo_memory import MemoryCluster
from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidReason, RegistryError
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop, Record
from echo_schemas.topics import DROPS

PATIENCE_S = 60.0
GROUP = "test.group"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline, pause = SystemClock().monotonic_s() + PATIENCE_S, threading.Event()
    while not condition():
        assert SystemClock().monotonic_s() < deadline, f"waited in vain: {what}"
        pause.wait(0.005)


class Bench:
    """A memory cluster with one topic, and loops on it."""

    def __init__(self, codec: Codec, namespace: Namespace) -> None:
        self.cluster = MemoryCluster()
        self.topic = namespace.topic(DROPS)
        self.metrics = BusMetrics(CollectorRegistry())
        for made in self.cluster.admin().create_topics([NewTopic(self.topic, 1, 1), NewTopic(f"{self.topic}.dlq", 1, 1)]).values():
            made.result(PATIENCE_S)
        self.wire = Wire(namespace=namespace, role="test", codec=codec, metrics=self.metrics)
        self.publisher = Publisher(self.cluster.producer({}), self.wire)

    def loop(self, handler: Handler, *, codec: Codec | None = None, **limits: Any) -> ConsumerLoop:
        return ConsumerLoop(
            self.cluster,
            self.wire if codec is None else replace(self.wire, codec=codec),
            [DROPS],
            handler,
            properties=group_properties(GROUP, client_id="test"),
            dead_letters=self.publisher,
            limits=LoopLimits(**{"busy_retry_s": 0.005, "commit_interval_s": 0.01, "drain_s": 5.0, **limits}),
        )

    def opened(self) -> list[Any]:
        """The loops' own clients from now on, as they are opened."""
        opened: list[Any] = []
        open_consumer = self.cluster.consumer

        def remember(config: Any) -> Any:
            opened.append(open_consumer(config))
            return opened[-1]

        self.cluster.consumer = remember  # type: ignore[method-assign]
        return opened

    def committed(self) -> int | None:
        found = self.cluster._broker.group(GROUP).committed.get((self.topic, 0))
        return None if found is None else found[0]

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"echo_bus_{name}", labels) or 0.0


@contextmanager
def running(loop: ConsumerLoop) -> Iterator[list[BaseException]]:
    """The loop on its own thread; what `run` raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as exc:  # the test looks at it
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        loop.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the loop did not end"


@pytest.fixture
def bench(codec: Codec, test_namespace: Namespace, make_drop: Callable[..., Drop]) -> Iterator[Bench]:
    bench = Bench(codec, test_namespace)
    for seq in range(10):
        bench.publisher.publish(DROPS, make_drop(seq))
    bench.publisher.flush(PATIENCE_S)
    yield bench
    bench.cluster.faults.before = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.publisher, "_failure", None)
        bench.publisher.close()


def test_a_registry_that_does_not_answer_is_waited_for(bench: Bench, codec: Codec) -> None:
    failures = 3

    class Flaky:
        def decode(self, payload: bytes | None) -> Record:
            nonlocal failures
            if failures:
                failures -= 1
                raise RegistryError("The registry did not answer.")
            return codec.decode(payload)

    flaky: Any = Flaky()
    seen: list[int] = []

    def handle(message: Message) -> Outcome:
        seen.append(message.offset)
        return ACCEPTED

    with running(bench.loop(handle, codec=flaky)) as errors:
        wait_until(lambda: len(seen) == 10, "all messages")
    assert seen == list(range(10))
    assert not errors
    assert bench.value("records_busy_total", topic=bench.topic) == 3


def test_a_dead_letter_that_is_not_acknowledged_stops_the_loop_and_keeps_its_offset(bench: Bench) -> None:
    bench.cluster.faults.fail_next_produce(f"{bench.topic}.dlq")

    def handle(message: Message) -> Outcome:
        return Invalid(InvalidReason.HANDLER_REFUSED) if message.offset == 4 else ACCEPTED

    with running(bench.loop(handle)) as errors:
        wait_until(lambda: errors, "the loop to fail")
    assert isinstance(errors[0], DeliveryFailed)
    assert bench.committed() == 4


def test_commits_that_fail_are_tried_again(bench: Bench) -> None:
    failures = 2

    def before(operation: str) -> None:
        nonlocal failures
        if operation == "commit" and failures:
            failures -= 1
            raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))

    bench.cluster.faults.before = before
    with running(bench.loop(lambda message: ACCEPTED)) as errors:
        wait_until(lambda: bench.committed() == 10, "the third commit")
    assert not errors
    assert bench.value("commits_total", group=GROUP, outcome="failed") == 2


@pytest.mark.parametrize(("code", "level"), [(KafkaError.ILLEGAL_GENERATION, "INFO"), (KafkaError.COORDINATOR_NOT_AVAILABLE, "WARNING")])
def test_a_commit_that_a_rebalance_refuses_is_no_warning(bench: Bench, caplog: pytest.LogCaptureFixture, code: int, level: str) -> None:
    caplog.set_level("INFO")
    error = KafkaError(code)
    bench.loop(lambda message: ACCEPTED)._on_commit(error, [])
    (line,) = [record for record in caplog.records if "were not committed" in record.message]
    assert (line.levelname, error.name() in line.message) == (level, True)


def test_a_handler_that_does_not_return_is_left_behind_at_the_deadline(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    started, gate = threading.Event(), threading.Event()

    def handle(message: Message) -> Outcome:
        started.set()
        gate.wait(PATIENCE_S)
        return ACCEPTED

    loop = bench.loop(handle, drain_s=0.05)
    with running(loop) as errors:
        assert started.wait(PATIENCE_S), "the handler was never called"
        loop.stop()
        wait_until(lambda: "did not return" in caplog.text, "the loop to give up")
    gate.set()
    assert not errors
    assert bench.committed() is None


def test_draining_finishes_what_is_in_flight(bench: Bench) -> None:
    held: list[Completion] = []

    def handle(message: Message) -> Outcome:
        held.append(Completion())
        return Accepted(held[-1])

    loop = bench.loop(handle)
    with running(loop) as errors:
        wait_until(lambda: len(held) == 10, "everything in flight")
        loop.stop()
        for completion in held:
            completion.done()
            completion.done()
    assert not errors
    assert bench.committed() == 10


def test_an_expelled_member_commits_nothing_of_what_it_lost_and_starts_again(bench: Bench) -> None:
    held: list[Completion] = []

    def handle(message: Message) -> Outcome:
        held.append(Completion())
        return Accepted(held[-1])

    opened = bench.opened()
    loop = bench.loop(handle, drain_s=0.05)
    with running(loop) as errors:
        wait_until(lambda: len(held) == 10, "everything in flight")
        opened[0].expire_session()
        wait_until(lambda: len(held) == 20, "everything to be offered again")
        for completion in held[:10]:
            completion.done()
        # The loop counts a message a moment after the handler has returned.
        wait_until(lambda: loop._worker.in_flight.count == 10, "the second ten, and none of the first, to be in flight")
    assert not errors
    assert not bench.committed(), "work of the lost assignment was committed"
    assert bench.value("rebalances_total", group=GROUP, kind="lost") == 1


def test_the_lag_of_a_partition_that_was_given_up_is_told_no_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_bus.group.consumer._LAG_INTERVAL_S", 0.0)
    place = {"topic": bench.topic, "partition": "0"}
    with running(bench.loop(lambda message: Accepted(Completion()), drain_s=0.01)) as errors:
        wait_until(lambda: bench.value("lag", **place) == 10, "the lag")
    assert not errors
    assert bench.metrics.registry.get_sample_value("echo_bus_lag", place) is None


class Told:
    """What a client hands out that was replaced."""

    def error(self) -> KafkaError:
        return KafkaError(
            KafkaError._FATAL, "Fatal error: Broker: Static consumer fenced by other consumer with same group.instance.id", True
        )

    def topic(self) -> None:
        return None

    partition = topic


def test_a_member_that_a_slow_broker_replaced_by_itself_joins_once_more_and_one_that_is_replaced_all_the_time_has_a_rival(
    bench: Bench,
) -> None:
    held: list[Completion] = []

    def handle(message: Message) -> Outcome:
        held.append(Completion())
        return Accepted(held[-1])

    def joined_again(times: int) -> Callable[[], bool]:
        return lambda: len(opened) > times

    opened = bench.opened()
    loop = bench.loop(handle, drain_s=0.05)
    with running(loop) as errors:
        wait_until(lambda: len(held) == 10, "everything in flight")
        opened[0].poll = lambda timeout: Told()
        wait_until(lambda: len(held) == 20, "everything to be offered again")
        for completion in held[:10]:
            completion.done()
        wait_until(lambda: loop._worker.in_flight.count == 10, "the second ten, and none of the first, to be in flight")
        assert not errors
        for number in range(1, 5):
            wait_until(joined_again(number), "the loop to join once more")
            opened[number].poll = lambda timeout: Told()
        wait_until(lambda: errors, "the loop to end")
    assert isinstance(errors[0], MemberReplaced)
    assert len(opened) == 5
    assert not bench.committed(), "work of the lost assignment was committed"
    assert bench.value("rebalances_total", group=GROUP, kind="lost") == 4


def test_a_handler_that_returns_nothing_is_told_so(bench: Bench) -> None:
    forgetful: Any = lambda message: None  # noqa: E731  a handler without a return
    with running(bench.loop(forgetful)) as errors:
        wait_until(lambda: errors, "the loop to fail")
    assert isinstance(errors[0], TypeError)
    assert "must return Accepted, Invalid or Busy" in str(errors[0])


def test_static_and_next_generation_members_have_their_properties() -> None:
    static = group_properties(GROUP, client_id="a", static_member="worker-1")
    assert static["group.instance.id"] == "worker-1"
    assert static["partition.assignment.strategy"] == "cooperative-sticky"
    assert static["enable.auto.commit"] is False
    prompt = group_properties(GROUP, client_id="a", is_prompt=True)
    assert prompt["heartbeat.interval.ms"] < static["heartbeat.interval.ms"]
    modern = group_properties(GROUP, client_id="a", next_generation=True)
    assert modern["group.protocol"] == "consumer"
    assert not {"partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"} & modern.keys()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, NotAuthorized),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, NotAuthorized),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicMissing),
        (KafkaError._AUTO_OFFSET_RESET, OffsetLost),
        (KafkaError.FENCED_INSTANCE_ID, MemberReplaced),
        (KafkaError._FATAL, TransportError),
    ],
)
def test_errors_of_the_client_that_stop(code: int, expected: type[TransportError]) -> None:
    raw: Any = ClientMessage(topic="t", partition=0)
    with pytest.raises(expected):
        check_error(KafkaError(code), raw, "team.rl.worker")


def test_a_closed_group_concerns_its_members_alone() -> None:
    raw: Any = ClientMessage(topic=None)
    closed = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(NotAuthorized, match=r"READ on the group team\.rl\.worker"):
        check_error(closed, raw, "team.rl.worker")
    # The client of a reader without a group has asked after one all the same.
    check_error(closed, raw)


def test_a_fatal_error_stops_and_a_passing_one_does_not() -> None:
    raw: Any = ClientMessage(topic=None)
    check_error(KafkaError(KafkaError._MAX_POLL_EXCEEDED), raw)
    check_error(KafkaError(KafkaError._PARTITION_EOF), raw)
    with pytest.raises(TransportError, match="failed for good"):
        check_error(KafkaError(KafkaError._STATE, "broken", True), raw)


class OneAtATime:
    """Takes a message when it has none in hand. `hasty`: ends the one in hand while it refuses the next."""

    def __init__(self, *, hasty: bool = False) -> None:
        self.taken: list[int] = []
        self.refused: list[int] = []
        self._hasty = hasty
        self._in_hand: Completion | None = None

    def __call__(self, message: Message) -> Outcome:
        if self._in_hand is not None:
            self.refused.append(message.offset)
            if self._hasty:
                self.finish()
            return BUSY
        self.taken.append(message.offset)
        self._in_hand = Completion()
        return Accepted(self._in_hand)

    def finish(self) -> None:
        completion, self._in_hand = self._in_hand, None
        assert completion is not None
        completion.done()


def test_a_busy_handler_is_offered_the_next_message_as_soon_as_one_is_done(bench: Bench) -> None:
    handler = OneAtATime()
    with running(bench.loop(handler, busy_retry_s=600.0)) as errors:
        for offset in range(10):
            wait_until(lambda: len(handler.taken) == offset + 1, f"message {offset} to be taken")  # noqa: B023
            if offset < 9:
                wait_until(lambda: offset + 1 in handler.refused, f"message {offset + 1} to be refused")  # noqa: B023
            handler.finish()
    assert handler.taken == list(range(10))
    assert not errors


def test_a_message_that_is_done_while_the_next_is_refused_does_not_leave_that_one_waiting(bench: Bench) -> None:
    handler = OneAtATime(hasty=True)
    with running(bench.loop(handler, busy_retry_s=600.0)) as errors:
        wait_until(lambda: len(handler.taken) == 10, "all messages")
        handler.finish()
    assert not errors


def test_what_is_handed_back_is_not_waited_for_and_not_committed(bench: Bench) -> None:
    taken: list[int] = []

    def handle(message: Message) -> Outcome:
        taken.append(message.offset)
        return ACCEPTED if message.offset < 3 else Accepted(Completion())

    loop = bench.loop(handle, drain_s=600.0)
    with running(loop) as errors:
        wait_until(lambda: len(taken) == 10, "all messages")
        loop.hand_back()
    assert not errors
    assert bench.committed() == 3
