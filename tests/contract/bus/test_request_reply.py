"""Requests and replies: never missed, accepted once, expired at their deadline, answered again from the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from echo_bus.dispatch import LeastLagChooser, WorkObserver
from echo_bus.errors import DeadlineExceeded, ProducerClosed
from echo_bus.message import ACCEPTED, Message, Outcome
from echo_bus.request_reply import CORRELATION_ID, REPLY_PARTITION, REPLY_TOPIC, Requester
from echo_bus.request_reply_server import Begin, ReplyAddress, ReplyServer
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, Sampling
from echo_schemas.records.rollout import ChatMessage
from echo_schemas.topics import REPLIES, REQUESTS
from tests.contract.bus.conftest import PATIENCE_S

Until = Callable[[Callable[[], object], str], None]
PARTITION = 2


def request(seq: int) -> RolloutRequest:
    return RolloutRequest(
        run_id="demo", group_id=f"demo/{seq}", seq=seq, purpose=Purpose.TRAIN, task="t", group_size=4, required_version=0,
        messages=(ChatMessage(role="user", content="?"),), sampling=Sampling(max_new_tokens=4), learner_version=0, issued_ms=1,
    )  # fmt: skip


def reply(correlation: str, seq: int = 0) -> RolloutReply:
    return RolloutReply(
        run_id="demo", correlation=correlation, group_id=f"demo/{seq}", attempt="a", worker_id="w", outcome=ReplyOutcome.DONE,
        version=0, weights_sha256="ab", where=(Coordinates(partition=0, offset=1),), time_ms=1,
    )  # fmt: skip


@pytest.fixture
def requester(kit: Any) -> Requester:
    kit.create(REQUESTS, REPLIES)
    requester = Requester(
        kit.publisher(),
        kit.reader(REPLIES),
        namespace=kit.namespace,
        reply_topic=REPLIES,
        reply_partition=PARTITION,
        metrics=kit.metrics,
        clock=kit.clock,
        max_pending=2,
    )
    kit.opened.append(requester)
    return requester


@pytest.fixture
def server(kit: Any) -> ReplyServer:
    return ReplyServer(kit.publisher(), REPLIES, namespace=kit.namespace, metrics=kit.metrics, clock=kit.clock, max_cached=2)


@pytest.fixture
def served(kit: Any, server: ReplyServer) -> Iterator[list[Message]]:
    """A worker that answers everything at once; the messages it saw."""
    seen: list[Message] = []

    def handle(message: Message) -> Outcome:
        seen.append(message)
        address = server.address_of(message)
        assert address is not None
        assert isinstance(message.record, RolloutRequest)
        if server.begin(address) is Begin.NEW:
            server.answer(address, reply(address.correlation_text, message.record.seq))
        return ACCEPTED

    with kit.running(REQUESTS, handle):
        yield seen


def soon_ms(kit: Any, seconds: float = PATIENCE_S) -> int:
    return int(kit.clock.time_ms() + seconds * 1000)


def test_a_request_is_answered_on_the_partition_it_names(kit: Any, requester: Requester, served: list[Message]) -> None:
    requester.start()
    for seq in range(5):
        pending = requester.send(REQUESTS, request(seq), deadline_ms=soon_ms(kit))
        assert pending.wait() == reply(pending.correlation, seq)
    headers = served[0].headers
    assert headers[REPLY_TOPIC] == kit.namespace.topic(REPLIES).encode()
    assert headers[REPLY_PARTITION] == b"\x00\x00\x00\x02"
    assert headers[CORRELATION_ID]
    assert requester.num_pending == 0
    assert kit.value("replies_total", outcome="accepted") == 5


def test_a_repeated_request_is_answered_from_the_cache_and_the_second_reply_is_an_orphan(
    kit: Any, requester: Requester, served: list[Message], until: Until
) -> None:
    requester.start()
    requester.send(REQUESTS, request(0), deadline_ms=soon_ms(kit), correlation="c-1").wait()
    again = requester.send(REQUESTS, request(0), deadline_ms=soon_ms(kit), correlation="c-1")
    again.cancel()
    until(lambda: kit.value("replies_cached_total") == 1, "the cached answer")
    until(lambda: kit.value("replies_total", outcome="orphan") == 1, "the orphan")


def test_nobody_answers(kit: Any, requester: Requester) -> None:
    requester.start()
    pending = requester.send(REQUESTS, request(0), deadline_ms=soon_ms(kit, 0.05))
    with pytest.raises(DeadlineExceeded, match="before its deadline"):
        pending.wait()
    assert requester.num_pending == 0
    assert kit.value("replies_total", outcome="expired") == 1


def test_pending_requests_are_bounded(kit: Any, requester: Requester) -> None:
    requester.start()
    first = requester.send(REQUESTS, request(0), deadline_ms=soon_ms(kit))
    requester.send(REQUESTS, request(1), deadline_ms=soon_ms(kit))
    with pytest.raises(DeadlineExceeded, match="2 requests already wait"):
        requester.send(REQUESTS, request(2), deadline_ms=soon_ms(kit, 0.05))
    first.cancel()
    requester.send(REQUESTS, request(3), deadline_ms=soon_ms(kit)).cancel()


def test_replies_of_others_are_orphans_on_our_partition_and_nothing_elsewhere(
    kit: Any, requester: Requester, server: ReplyServer, until: Until
) -> None:
    requester.start()
    server.answer(ReplyAddress(b"else-1", PARTITION + 1, None), reply("else-1")).wait(PATIENCE_S)
    server.answer(ReplyAddress(b"else-2", PARTITION, None), reply("else-2")).wait(PATIENCE_S)
    until(lambda: kit.value("replies_total", outcome="orphan") == 1, "the orphan")


def test_nothing_is_sent_before_the_reply_partition_is_positioned(kit: Any, requester: Requester) -> None:
    with pytest.raises(ProducerClosed, match="between `start` and `close`"):
        requester.send(REQUESTS, request(0), deadline_ms=soon_ms(kit))


def test_a_server_begins_once_and_again_after_giving_up(kit: Any, requester: Requester, server: ReplyServer) -> None:
    address = ReplyAddress(b"c", PARTITION, soon_ms(kit))
    assert server.begin(address) is Begin.NEW
    assert server.begin(address) is Begin.RUNNING
    server.abandon(address)
    assert server.begin(address) is Begin.NEW
    server.answer(address, reply("c"))
    assert server.begin(address) is Begin.ANSWERED
    assert server.begin(ReplyAddress(b"late", PARTITION, kit.clock.time_ms() - 1)) is Begin.EXPIRED


def test_the_cache_forgets_the_oldest(kit: Any, requester: Requester, server: ReplyServer) -> None:
    for name in ("a", "b", "c"):
        server.answer(ReplyAddress(name.encode(), PARTITION, None), reply(name))
    assert server.begin(ReplyAddress(b"a", PARTITION, None)) is Begin.NEW
    assert server.begin(ReplyAddress(b"c", PARTITION, None)) is Begin.ANSWERED


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({CORRELATION_ID: b"c", REPLY_TOPIC: b"elsewhere", REPLY_PARTITION: b"\x00\x00\x00\x01"}, InvalidReason.INCONSISTENT),
        ({CORRELATION_ID: b"c", REPLY_PARTITION: b"1"}, InvalidReason.LENGTH_MISMATCH),
        ({CORRELATION_ID: b"", REPLY_PARTITION: b"\x00\x00\x00\x01"}, InvalidReason.LENGTH_MISMATCH),
        ({CORRELATION_ID: b"c" * 2_000, REPLY_PARTITION: b"\x00\x00\x00\x01"}, InvalidReason.LENGTH_MISMATCH),
        ({CORRELATION_ID: b"c", REPLY_PARTITION: b"\x00\x00\x00\x04"}, InvalidReason.INCONSISTENT),
        ({CORRELATION_ID: b"c", REPLY_PARTITION: b"\x7f\xff\xff\xff"}, InvalidReason.INCONSISTENT),
        ({CORRELATION_ID: b"c", REPLY_PARTITION: b"\x00\x00\x00\x01", "echo-deadline-ms": b"9" * 5_000}, InvalidReason.INCONSISTENT),
        ({CORRELATION_ID: b"c", REPLY_PARTITION: b"\xff\xff\xff\xff"}, InvalidReason.NEGATIVE_NUMBER),
        ({CORRELATION_ID: b"c", REPLY_PARTITION: b"\x00\x00\x00\x01", "echo-deadline-ms": b"soon"}, InvalidReason.INCONSISTENT),
    ],
)
def test_addresses_that_contradict_themselves_are_invalid(
    kit: Any, requester: Requester, server: ReplyServer, headers: dict[str, bytes], reason: InvalidReason
) -> None:
    named = {REPLY_TOPIC: kit.namespace.topic(REPLIES).encode(), **headers}
    with pytest.raises(InvalidRecord) as caught:
        server.address_of(Message(REQUESTS, 0, 0, None, request(0), named, 1, 1))
    assert caught.value.reason == reason
    assert server.address_of(Message(REQUESTS, 0, 0, None, request(0), {}, 1, 1)) is None


def test_lag_is_outstanding_work_and_the_chooser_waits_for_it_to_fall(kit: Any, until: Until) -> None:
    kit.create(REQUESTS)
    observer = WorkObserver(kit.cluster, physical=kit.namespace.topic(REQUESTS), group=kit.namespace.group("group"), client_id="feeder")
    kit.opened.append(observer)
    count = observer.num_partitions()
    chooser, publisher = LeastLagChooser(count, depth=2), kit.publisher()
    issued: list[int] = []
    while (partition := chooser.choose()) is not None:
        issued.append(partition)
        receipt = publisher.publish(REQUESTS, request(len(issued)), partition=partition)
        chooser.follow(partition, receipt)
    assert sorted(issued) == [0, 0, 1, 1, 2, 2, 3, 3]
    publisher.flush(PATIENCE_S)
    chooser.observe(observer.observe(count))
    assert chooser.outstanding == 8
    gate = threading.Event()

    def handle(message: Message) -> Outcome:
        assert gate.wait(PATIENCE_S), "the gate never opened"
        return ACCEPTED

    with kit.running(REQUESTS, handle):
        gate.set()

        def is_idle() -> bool:
            chooser.observe(observer.observe(count))
            return chooser.outstanding == 0

        until(is_idle, "the lag to fall to nothing")
    assert chooser.choose() is not None
