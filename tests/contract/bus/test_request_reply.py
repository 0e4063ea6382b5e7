"""Requests that want an answer: answered where they say, begun once, expired at their deadline, answered again from the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from echo_bus.clock import Deadline
from echo_bus.message import ACCEPTED, Message, Outcome
from echo_bus.requests.dispatch import LeastLagChooser, WorkObserver
from echo_bus.requests.request_reply import CORRELATION_ID, REPLY_PARTITION, REPLY_TOPIC, Begin, ReplyAddress, ReplyServer, reply_headers
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
def server(kit: Any) -> ReplyServer:
    kit.create(REQUESTS, REPLIES)
    return ReplyServer(kit.publisher(), REPLIES, kit.bus, max_cached=2)


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


def asked(kit: Any, correlation: str, seq: int, partition: int = PARTITION) -> None:
    headers = reply_headers(correlation, topic=kit.namespace.topic(REPLIES), partition=partition, deadline_ms=soon_ms(kit))
    kit.publisher().publish(REQUESTS, request(seq), headers=headers).wait(PATIENCE_S)


def replied(kit: Any) -> list[Message]:
    """What lies on `replies`, in the order of the log."""
    reader = kit.reader(REPLIES)
    reader.start()
    return [message for batch in reader.read_to_end(Deadline.after(PATIENCE_S)) for message in batch]


def test_a_request_is_answered_on_the_partition_it_names(kit: Any, served: list[Message], until: Until) -> None:
    for seq in range(5):
        asked(kit, f"c-{seq}", seq)
    until(lambda: len(replied(kit)) == 5, "five answers")
    answers = {message.headers[CORRELATION_ID].decode(): message for message in replied(kit)}
    for seq in range(5):
        assert answers[f"c-{seq}"].partition == PARTITION
        assert answers[f"c-{seq}"].record == reply(f"c-{seq}", seq)
    headers = served[0].headers
    assert headers[REPLY_TOPIC] == kit.namespace.topic(REPLIES).encode()
    assert headers[REPLY_PARTITION] == b"\x00\x00\x00\x02"


def test_a_repeated_request_is_answered_from_the_cache_where_it_asks_for_it_now(kit: Any, served: list[Message], until: Until) -> None:
    asked(kit, "c-1", 0)
    until(lambda: len(replied(kit)) == 1, "the answer")
    asked(kit, "c-1", 0, partition=PARTITION - 1)
    until(lambda: len(replied(kit)) == 2, "the answer again")
    assert kit.value("replies_cached_total") == 1
    first, second = sorted(replied(kit), key=lambda message: message.timestamp_ms)
    assert (first.partition, second.partition) == (PARTITION, PARTITION - 1)
    assert first.record == second.record
    assert len(served) == 2


def test_a_server_begins_once_and_again_after_giving_up(kit: Any, server: ReplyServer) -> None:
    address = ReplyAddress(b"c", PARTITION, soon_ms(kit))
    assert server.begin(address) is Begin.NEW
    assert server.begin(address) is Begin.RUNNING
    server.abandon(address)
    assert server.begin(address) is Begin.NEW
    server.answer(address, reply("c"))
    assert server.begin(address) is Begin.ANSWERED
    assert server.begin(ReplyAddress(b"late", PARTITION, kit.clock.time_ms() - 1)) is Begin.EXPIRED


def test_the_cache_forgets_the_oldest(kit: Any, server: ReplyServer) -> None:
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
    kit: Any, server: ReplyServer, headers: dict[str, bytes], reason: InvalidReason
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
