"""Receipts of a worker: one for each correlation id, whatever became of the request, and one generation for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from echo_bus.requests.request_reply import CORRELATION_ID, DEADLINE_MS, PARTITION_STRUCT, REPLY_PARTITION, reply_headers
from echo_memory import MemoryCluster
from echo_rollout.engines.engine import Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.columns import pack_tokens
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import ChatMessage, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, Sampling
from echo_schemas.topics import REPLIES, REQUESTS
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, WAIT_S, GatedEngine, Swarm, wait_until
from tests.unit.rollout.test_requests import NotingEngine, committed, dead_letters, group_of, num_noted

pytestmark = pytest.mark.slow

PARTITION = 1
LONG_MS = 60_000


def ask(
    swarm: Swarm, request: RolloutRequest, correlation: str, *, within_ms: int = LONG_MS, to: str | None = None, partition: int = 0
) -> None:
    """Send `request` with a reply address; `to` names another topic than the one for replies."""
    deadline_ms = time.time_ns() // 1_000_000 + within_ms
    headers = reply_headers(
        correlation, topic=to or swarm.bus.namespace.topic(REPLIES), partition=PARTITION, deadline_ms=deadline_ms
    )  # fmt: skip
    record = swarm.request(request.seq, purpose=request.purpose, **_fields(request), correlation=correlation, deadline_ms=deadline_ms)
    swarm.publisher.publish(REQUESTS, record, partition=partition, headers=headers).wait(WAIT_S)


def _fields(request: RolloutRequest) -> dict[str, Any]:
    names = ("prompt_token_ids", "required_version", "exact", "sampling", "group_size")
    return {name: getattr(request, name) for name in names}


def replies(swarm: Swarm, cluster: MemoryCluster) -> list[RolloutReply]:
    """What lies on the reply partition; nothing may lie on another."""
    logs = cluster._broker.topics[swarm.bus.namespace.topic(REPLIES)].partitions
    for partition, log in enumerate(logs):
        assert partition == PARTITION or not list(log.read(0, committed=True))
    found = []
    for record in logs[PARTITION].read(0, committed=True):
        reply = swarm.bus.codec.decode(record.value or b"")
        assert isinstance(reply, RolloutReply)
        assert dict(record.headers or ())[CORRELATION_ID] == reply.correlation.encode()
        found.append(reply)
    return found


def the_reply(swarm: Swarm, cluster: MemoryCluster) -> RolloutReply:
    wait_until(lambda: replies(swarm, cluster), "the receipt")
    (reply,) = replies(swarm, cluster)
    return reply


def test_a_receipt_names_version_checksum_and_every_trajectory(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    manifest = swarm.publish_version(3)
    swarm.start_worker(ScriptedEngine())
    ask(swarm, swarm.request(7, required_version=3, exact=True), "c-7")
    reply = the_reply(swarm, cluster)
    members = swarm.trajectories()
    assert (reply.outcome, reply.version, reply.weights_sha256) == (ReplyOutcome.DONE, 3, manifest.sha256)
    assert (reply.group_id, reply.worker_id, reply.attempt) == (f"{RUN}/7", "w0", members[0].attempt)
    with_offsets = [(where.partition, where.offset) for where in reply.where]
    assert len(with_offsets) == len(set(with_offsets)) == len(members) == 2
    wait_until(lambda: committed(swarm, cluster).get(0) == 1, "the request to be committed")


def test_a_worker_installs_the_version_that_is_asked_for_before_it_generates(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    ask(swarm, swarm.request(0, required_version=1, exact=True), "c-0")
    wait_until(lambda: swarm.metric("echo_rollout_groups_waiting") == 1, "the request to be held")
    assert not replies(swarm, cluster)
    swarm.publish_version(1)
    assert the_reply(swarm, cluster).version == 1
    assert {(record.min_version, record.max_version) for record in swarm.trajectories()} == {(1, 1)}


def test_weights_that_do_not_come_are_answered_before_the_deadline(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.statuses()[-1:] and swarm.statuses()[-1].installed_version == 0, "the worker to be ready")
    deadline_ms = time.time_ns() // 1_000_000 + 2_000
    ask(swarm, swarm.request(0, required_version=9, exact=True), "c-0", within_ms=2_000)
    reply = the_reply(swarm, cluster)
    assert reply.outcome is ReplyOutcome.NOT_READY
    assert reply.version == 0
    assert reply.error == "Version 9 did not come before the deadline; here is 0."
    assert reply.time_ms < deadline_ms
    assert not swarm.trajectories()


def test_a_version_that_was_passed_is_answered_as_not_ready(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(3)
    swarm.start_worker(ScriptedEngine())
    ask(swarm, swarm.request(0, required_version=2, exact=True), "c-0")
    reply = the_reply(swarm, cluster)
    assert (reply.outcome, reply.version) == (ReplyOutcome.NOT_READY, 3)
    assert reply.error == "Version 3 is installed, 2 was asked for."


def test_a_repeated_question_gets_the_same_answer_and_no_second_generation(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    engine = GatedEngine()
    swarm.start_worker(engine)
    ask(swarm, swarm.request(0, exact=True), "c-0")
    wait_until(lambda: engine.num_running, "the engine to be at work")
    ask(swarm, swarm.request(0, exact=True), "c-0")
    ask(swarm, swarm.request(1), "c-1", partition=1)
    wait_until(lambda: engine.num_running == 2, "the request behind them")
    engine.gate.set()
    wait_until(lambda: committed(swarm, cluster).get(0) == 2, "both deliveries to be committed")
    ask(swarm, swarm.request(0, exact=True), "c-0")
    found = wait_until(lambda: [each for each in replies(swarm, cluster) if each.correlation == "c-0"][1:], "the answer from the cache")
    assert found == [each for each in replies(swarm, cluster) if each.correlation == "c-0"][:1]
    assert len(swarm.groups()[f"{RUN}/0"]) == 2
    assert engine.most_running == 2


def test_what_comes_after_its_deadline_is_answered_and_not_generated(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    ask(swarm, swarm.request(0), "c-0", within_ms=-1)
    swarm.start_worker(ScriptedEngine())
    reply = the_reply(swarm, cluster)
    assert (reply.outcome, reply.error) == (ReplyOutcome.EXPIRED, "It came after its deadline.")
    wait_until(lambda: committed(swarm, cluster).get(0) == 1, "it to be committed")
    assert not swarm.trajectories()


class ForeignEngine(ScriptedEngine):
    """Answers with a token that the model does not have."""

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        generations = await super().generate(prompt, n, sampling)
        generations[0].token_ids[:] = np.int32(999)
        return generations


def test_a_group_that_fails_is_answered_with_the_cause(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ForeignEngine())
    ask(swarm, swarm.request(0), "c-0")
    reply = the_reply(swarm, cluster)
    assert reply.outcome is ReplyOutcome.FAILED
    assert "outside the vocabulary of 32" in str(reply.error)


def test_a_request_that_is_refused_for_good_is_answered_too(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    ask(swarm, swarm.request(0, prompt_token_ids=pack_tokens([999])), "c-0")
    reply = the_reply(swarm, cluster)
    assert reply.outcome is ReplyOutcome.FAILED
    assert "vocabulary" in str(reply.error)
    wait_until(lambda: dead_letters(swarm, cluster), "the dead letter")


def test_a_reply_address_elsewhere_is_refused(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    ask(swarm, swarm.request(0), "c-0", to="somewhere.else")
    ask(swarm, swarm.request(1), "c-1")
    swarm.start_worker(ScriptedEngine())
    assert the_reply(swarm, cluster).correlation == "c-1"
    (headers,) = wait_until(lambda: dead_letters(swarm, cluster), "the dead letter")
    assert any(b"nowhere else" in value for value in headers.values())


def test_a_worker_that_stops_in_the_middle_answers_nothing_and_another_does(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    first = swarm.start_worker(ScriptedEngine(), "w0")
    ask(swarm, swarm.request(0, required_version=1, exact=True), "c-0")
    wait_until(lambda: swarm.metric("echo_rollout_groups_waiting") == 1, "the first worker to hold it")
    first.stop()
    assert not replies(swarm, cluster)
    swarm.publish_version(1)
    swarm.start_worker(ScriptedEngine(), "w1")
    reply = the_reply(swarm, cluster)
    assert (reply.worker_id, reply.outcome) == ("w1", ReplyOutcome.DONE)


def test_requests_whose_partition_goes_and_comes_back_are_generated_and_answered_once(
    make_swarm: MakeSwarm, cluster: MemoryCluster
) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 4}, run={"name": RUN, "drain_s": 0.2})
    swarm.publish_version(0)
    first, second = NotingEngine(), NotingEngine()
    swarm.start_worker(first, "w0")
    group = group_of(swarm, cluster)
    for seq in range(8):
        ask(swarm, swarm.request(seq, prompt_token_ids=pack_tokens([1, 2, 3 + seq])), f"c-{seq}", partition=seq % 4)
    wait_until(lambda: first.num_running == 5 and num_noted(group) == 8, "five groups in the engine, and three that wait for room")
    other = swarm.start_worker(second, "w1")
    wait_until(lambda: second.num_running == 4, "the second worker to begin what lies in its partitions")
    other.stop()
    wait_until(lambda: [len(member.owned) for member in group.members] == [4], "the partitions to come back")
    first.gate.set()
    wait_until(lambda: len(replies(swarm, cluster)) == 8, "all answers")
    wait_until(lambda: committed(swarm, cluster) == dict.fromkeys(range(4), 2), "all requests to be committed")
    assert sorted(reply.correlation for reply in replies(swarm, cluster)) == [f"c-{seq}" for seq in range(8)]
    assert {len({record.attempt for record in members}) for members in swarm.groups().values()} == {1}


def test_other_purposes_are_answered_alike(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(2)
    swarm.start_worker(ScriptedEngine())
    ask(swarm, swarm.request(5, purpose=Purpose.EVAL, required_version=2, exact=True, group_size=3), "e-5")
    reply = the_reply(swarm, cluster)
    assert (reply.group_id, len(reply.where)) == (f"{RUN}/eval-5", 3)


def ask_with(swarm: Swarm, seq: int, headers: dict[str, bytes], **changes: Any) -> None:
    """A request whose headers are all right but for `headers`."""
    right = dict(reply_headers("c", topic=swarm.bus.namespace.topic(REPLIES), partition=PARTITION, deadline_ms=2**42))
    record = swarm.request(seq, **changes)
    swarm.publisher.publish(REQUESTS, record, partition=0, headers=tuple({**right, **headers}.items())).wait(WAIT_S)


@pytest.mark.parametrize(
    ("headers", "changes", "says"),
    [
        ({REPLY_PARTITION: PARTITION_STRUCT.pack(4)}, {}, b"has the partitions 0 to 3"),
        ({REPLY_PARTITION: PARTITION_STRUCT.pack(2**31 - 1)}, {}, b"has the partitions 0 to 3"),
        ({CORRELATION_ID: b""}, {}, b"has 0 bytes"),
        ({CORRELATION_ID: b"c" * 500_000}, {}, b"has 500000 bytes"),
        ({DEADLINE_MS: b"9" * 5_000}, {}, b"not a number of milliseconds"),
        ({}, {"group_size": 2**31 - 1}, b"may ask for 4096"),
        ({}, {"entry": "[" * 100_000}, b"more than 64 levels"),
        ({}, {"prompt_token_ids": b"", "messages": (ChatMessage(role="user", content="A" * 500_000),)}, b"tokens have at most"),
    ],
)
def test_a_requester_that_is_wrong_is_a_dead_letter_and_the_worker_goes_on(
    make_swarm: MakeSwarm, cluster: MemoryCluster, headers: dict[str, bytes], changes: dict[str, Any], says: bytes
) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    worker = swarm.start_worker(ScriptedEngine())
    ask_with(swarm, 0, headers, **changes)
    swarm.ask(swarm.request(1), partition=0)
    wait_until(lambda: committed(swarm, cluster).get(0) == 2 or not worker.is_alive, "both to be committed")
    assert worker.is_alive, worker.error
    assert list(swarm.groups()) == [f"{RUN}/1"]
    (letter,) = dead_letters(swarm, cluster)
    assert says in letter["__connect.errors.exception.message"]


def test_a_correlation_id_of_any_bytes_comes_back_as_it_is(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    """Spring's are sixteen bytes of a UUID."""
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    binary = bytes(range(0xF8, 0x100)) * 2
    ask_with(swarm, 0, {CORRELATION_ID: binary}, exact=True)
    log = cluster._broker.topics[swarm.bus.namespace.topic(REPLIES)].partitions[PARTITION]
    (record,) = wait_until(lambda: list(log.read(0, committed=True)), "the receipt")
    assert dict(record.headers or ())[CORRELATION_ID] == binary
    reply = swarm.bus.codec.decode(record.value or b"")
    assert isinstance(reply, RolloutReply)
    assert reply.correlation == binary.hex()


def test_a_correlation_id_without_an_address_is_refused_and_not_generated(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    swarm.ask(swarm.request(0, correlation="c-0"), partition=0)
    (letter,) = wait_until(lambda: dead_letters(swarm, cluster), "the dead letter")
    assert b"no header says where to" in letter["__connect.errors.exception.message"]
    assert not swarm.trajectories()


def test_requests_for_weights_that_never_come_take_no_room_and_only_so_many_wait(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_rollout.holding.MOST_EARLY", 12)
    swarm = make_swarm(rollout={"groups_in_flight": 1})
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    in_a_year_ms = time.time_ns() // 1_000_000 + 365 * 86_400_000
    for number in range(30):
        record = swarm.request(1_000 + number, required_version=9, exact=True, deadline_ms=in_a_year_ms + number)
        swarm.publisher.publish(REQUESTS, record, partition=number % 3)
    wait_until(lambda: swarm.metric("echo_rollout_groups_waiting") == 12, "as many to wait as may")
    wait_until(lambda: swarm.metric("echo_rollout_groups_total", outcome="not_ready") == 18, "the others to be answered")
    for seq in range(4):
        swarm.ask(swarm.request(seq), partition=seq)
    wait_until(lambda: len(swarm.groups()) == 4, "the work of the run, behind and beside them")


def test_a_receipt_that_cannot_be_written_is_given_up_and_its_request_is_done(
    make_swarm: MakeSwarm, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradict(reply: RolloutReply) -> None:
        raise InvalidRecord(InvalidReason.INCONSISTENT, "A reply that contradicts itself.")

    monkeypatch.setattr(RolloutReply, "validate", contradict)
    swarm = make_swarm()
    swarm.publish_version(0)
    worker = swarm.start_worker(ScriptedEngine())
    for seq in range(2):
        ask(swarm, swarm.request(seq), f"c-{seq}")
    wait_until(lambda: committed(swarm, cluster).get(0) == 2, "both to be committed")
    assert worker.is_alive
    assert len(swarm.groups()) == 2
