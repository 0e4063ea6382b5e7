"""The consumer loop: at least once, three outcomes, back-pressure, rebalances and a clean way out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.errors import TooManyDeadLetters, TopicMissing, TransportError
from echo_bus.group.state import LoopLimits
from echo_bus.message import ACCEPTED, BUSY, Accepted, Completion, Invalid, Message, Outcome
from echo_memory.cluster import MemoryCluster
from echo_schemas.errors import InvalidReason
from echo_schemas.records import Drop
from echo_schemas.topics import DROPS
from tests.contract.bus.conftest import PATIENCE_S

Until = Callable[[Callable[[], object], str], None]


# Whoever waits for a session of this length waits in vain.
LONG_SESSION = {"session.timeout.ms": int(3_000 * PATIENCE_S), "max.poll.interval.ms": int(6_000 * PATIENCE_S)}


def accept(_: Message) -> Outcome:
    return ACCEPTED


def seq_of(message: Message) -> int:
    assert isinstance(message.record, Drop)
    return message.record.seq


def publish(kit: Any, drop: Callable[..., Drop], seqs: range, run_id: str = "demo") -> None:
    publisher = kit.publisher()
    for seq in seqs:
        publisher.publish(DROPS, drop(seq, run_id))
    publisher.flush(PATIENCE_S)


def test_every_message_arrives_once_in_order_and_is_committed(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(500))
    seen: dict[int, list[int]] = {}

    def handle(message: Message) -> Outcome:
        seen.setdefault(message.partition, []).append(message.offset)
        return ACCEPTED

    with kit.running(DROPS, handle) as running:
        until(lambda: sum(map(len, seen.values())) == 500, "all 500 messages")
        running.stop()
    assert all(offsets == list(range(len(offsets))) for offsets in seen.values())
    assert kit.committed(DROPS) == 500
    physical = kit.namespace.topic(DROPS)
    assert kit.value("records_read_total", topic=physical) == 500
    assert kit.value("records_accepted_total", topic=physical) == 500
    assert kit.value("partitions_assigned", topic=physical) == 0


def test_a_later_member_goes_on_where_the_first_stopped(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    seen: list[int] = []

    def handle(message: Message) -> Outcome:
        seen.append(seq_of(message))
        return ACCEPTED

    for seqs in (range(50), range(50, 80)):
        publish(kit, drop, seqs)
        with kit.running(DROPS, handle) as running:
            until(lambda end=seqs.stop: len(seen) == end, f"messages up to {seqs.stop}")  # type: ignore[misc]  # bound by default
            running.stop()
    assert sorted(seen) == list(range(80))


def test_an_offset_waits_for_its_completion_and_for_those_before_it(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(10))
    completions: dict[int, Completion] = {}

    def handle(message: Message) -> Outcome:
        completions[message.offset] = Completion()
        return Accepted(completions[message.offset])

    with kit.running(DROPS, handle) as running:
        until(lambda: len(completions) == 10, "all offered")
        for offset in range(1, 10):
            completions[offset].done()
        until(lambda: running.loop._worker.in_flight.count == 1, "one left in flight")
        assert kit.committed(DROPS) == 0
        completions[0].done()
        until(lambda: kit.committed(DROPS) == 10, "everything committed while the loop runs")
        running.stop()


def test_no_more_than_the_limit_is_in_flight(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(40))
    waiting: list[Completion] = []
    most = 0

    def handle(message: Message) -> Outcome:
        nonlocal most
        waiting.append(Completion())
        most = max(most, len(waiting))
        return Accepted(waiting[-1])

    with kit.running(DROPS, handle, limits=LoopLimits(max_in_flight=5)) as running:
        done = 0
        while done < 40:
            until(lambda: len(waiting) == min(5, 40 - done), "the handler filled up")  # noqa: B023  called within the round
            # The loop counts a message a moment after the handler has returned.
            until(lambda: running.loop._worker.in_flight.count == len(waiting), "the loop to count what the handler holds")
            waiting.pop(0).done()
            done += 1
        running.stop()
    assert most == 5
    assert kit.committed(DROPS) == 40


@pytest.mark.parametrize("most", [{"max_waiting_messages": 2}, {"max_waiting_bytes": 1}])
def test_busy_pauses_one_partition_offers_again_in_order_and_loses_nothing(
    kit: Any, drop: Callable[..., Drop], until: Until, most: dict[str, int]
) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(200))
    seen: dict[int, list[int]] = {}
    gate = threading.Event()
    refused = Counter[tuple[int, int]]()

    def handle(message: Message) -> Outcome:
        if message.partition == 0 and message.offset >= 5 and not gate.is_set():
            refused[message.partition, message.offset] += 1
            return BUSY
        seen.setdefault(message.partition, []).append(message.offset)
        return ACCEPTED

    def num_seen(*partitions: int) -> int:
        return sum(len(seen.get(partition, [])) for partition in partitions)

    with kit.running(DROPS, handle, limits=LoopLimits(busy_retry_s=0.01, **most)) as running:
        until(lambda: refused[0, 5] >= 3, "the busy message to be offered again")
        reader = kit.reader(DROPS)
        ends = reader.end_offsets()
        until(lambda: num_seen(1, 2, 3) == sum(ends["drops", p] for p in (1, 2, 3)), "the other partitions to go on")
        assert set(refused) == {(0, 5)}
        until(lambda: kit.value("partitions_paused", topic=kit.namespace.topic(DROPS)) == 1, "the busy partition to be paused")
        gate.set()
        until(lambda: num_seen(0, 1, 2, 3) == 200, "the busy partition to catch up")
        running.stop()
    assert seen[0] == list(range(ends["drops", 0]))
    assert kit.committed(DROPS) == 200
    assert kit.value("partitions_paused", topic=kit.namespace.topic(DROPS)) == 0


def test_messages_behind_a_busy_one_wait_in_memory_and_are_not_fetched_twice(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(60))
    seen: list[int] = []
    num_free = threading.Semaphore(0)

    def handle(message: Message) -> Outcome:
        if not num_free.acquire(blocking=False):
            return BUSY
        seen.append(message.offset)
        return ACCEPTED

    with kit.running(DROPS, handle, limits=LoopLimits(busy_retry_s=0.01, max_waiting_messages=60)) as running:
        for _ in range(60):
            num_free.release()
            until(lambda: not num_free._value, "the next message to be accepted")
        running.stop()
    assert seen == list(range(60))
    assert kit.value("records_read_total", topic=kit.namespace.topic(DROPS)) == 60
    assert kit.committed(DROPS) == 60


def test_invalid_messages_become_dead_letters_and_the_partition_moves_on(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(3))
    publisher = kit.publisher()
    publisher.publish_bytes(kit.namespace.topic(DROPS), b"\x07garbage", key=b"demo/3", headers=[("traceparent", b"00-ab")], partition=0)
    publisher.flush(PATIENCE_S)
    publish(kit, drop, range(4, 6))
    seen: list[int] = []

    def handle(message: Message) -> Outcome:
        if seq_of(message) == 1:
            return Invalid(InvalidReason.HANDLER_REFUSED, "No such group.")
        seen.append(seq_of(message))
        return ACCEPTED

    with kit.running(DROPS, handle) as running:
        until(lambda: seen == [0, 2, 4, 5], "the sound messages")
        until(lambda: kit.committed(DROPS) == 6, "the invalid ones to be committed too")
        running.stop()
    letters = kit.cluster.consumer({"group.id": "letters", "auto.offset.reset": "earliest"})
    letters.subscribe([kit.namespace.dead_letters(DROPS)])
    found: dict[bytes, Any] = {}

    def collect() -> bool:
        raw = letters.poll(0.2)
        if raw is not None and raw.error() is None:
            found[dict(raw.headers() or [])["echo-reason"]] = raw
        return len(found) == 2

    until(collect, "two dead letters")
    letters.close()
    garbage = found[b"bad_magic"]
    assert (garbage.key(), garbage.value()) == (b"demo/3", b"\x07garbage")
    assert dict(garbage.headers())["traceparent"] == b"00-ab"
    assert dict(garbage.headers())["kafka_dlt-original-offset"] == b"3"
    assert dict(found[b"handler_refused"].headers())["__connect.errors.exception.message"] == b"No such group."


def test_too_many_invalid_messages_stop_the_loop_and_are_not_committed(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS, num_partitions=1)
    publisher = kit.publisher()
    for _ in range(50):
        publisher.publish_bytes(kit.namespace.topic(DROPS), b"garbage", key=b"demo/3", partition=0)
    publisher.flush(PATIENCE_S)
    limits = DeadLetterLimits(stop_after=9)
    with kit.running(DROPS, lambda message: ACCEPTED, dead_letter_limits=limits) as running, pytest.raises(TooManyDeadLetters):
        running.join()
    assert kit.committed(DROPS) <= 9
    assert kit.value("dead_letters_total", topic=kit.namespace.topic(DROPS), reason="bad_magic") == 9


def test_other_runs_are_passed_by_counted_and_committed(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(20), run_id="yesterday")
    publish(kit, drop, range(10))
    seen: list[int] = []

    def handle(message: Message) -> Outcome:
        seen.append(seq_of(message))
        return ACCEPTED

    with kit.running(DROPS, handle, run_id="demo") as running:
        until(lambda: len(seen) == 10, "our run's messages")
        until(lambda: kit.committed(DROPS) == 30, "all offsets")
        running.stop()
    assert sorted(seen) == list(range(10))
    assert kit.value("records_ignored_total", topic=kit.namespace.topic(DROPS), reason="other_run") == 20


def test_an_error_in_the_handler_ends_the_loop_and_its_message_is_read_again(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(10))
    seen: list[int] = []

    def failing(message: Message) -> Outcome:
        if seq_of(message) == 4:
            raise RuntimeError("The disk is full.")
        return ACCEPTED

    def handle(message: Message) -> Outcome:
        seen.append(seq_of(message))
        return ACCEPTED

    with kit.running(DROPS, failing) as running, pytest.raises(RuntimeError, match="disk is full"):
        running.join()
    assert kit.committed(DROPS) == 4
    with kit.running(DROPS, handle) as running:
        until(lambda: len(seen) == 6, "the failed message and those behind it")
        running.stop()
    assert seen == list(range(4, 10))


def test_a_stalled_handler_bounds_what_is_fetched_and_the_member_stays(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(600))
    gate, seen = threading.Event(), Counter[int]()

    def handle(message: Message) -> Outcome:
        assert gate.wait(PATIENCE_S), "the gate never opened"
        seen[seq_of(message)] += 1
        return ACCEPTED

    with kit.running(DROPS, handle, limits=LoopLimits(max_queued_messages=50, batch_size=20)) as running:
        until(lambda: running.loop._handover.num_messages >= 50, "a full hand-over")
        until(lambda: running.loop._all_paused, "the partitions to be paused")
        assert running.loop._handover.num_messages <= 50 + 20
        gate.set()
        until(lambda: len(seen) == 600, "everything after the stall")
        running.stop()
    assert set(seen.values()) == {1}
    assert kit.value("rebalances_total", group=kit.namespace.group("group"), kind="lost") == 0


@pytest.mark.parametrize("group_options", [{}, {"next_generation": True}], ids=["cooperative", "kip848"])
def test_a_second_member_takes_its_share_and_gives_it_back(
    kit: Any, drop: Callable[..., Drop], until: Until, group_options: dict[str, bool]
) -> None:
    kit.create(DROPS)
    seen: dict[str, list[int]] = {"first": [], "second": []}

    def handler(name: str) -> Callable[[Message], Outcome]:
        def handle(message: Message) -> Outcome:
            seen[name].append(seq_of(message))
            return ACCEPTED

        return handle

    with kit.running(DROPS, handler("first"), group_options=group_options) as first:
        until(lambda: first.loop._assignment, "the first assignment")
        with kit.running(DROPS, handler("second"), group_options=group_options) as second:
            until(lambda: len(first.loop._assignment) == len(second.loop._assignment) == 2, "two partitions each")
            publish(kit, drop, range(100))
            until(lambda: len(seen["first"]) + len(seen["second"]) == 100, "all messages")
            second.stop()
        until(lambda: len(first.loop._assignment) == 4, "the first to have everything again")
        publish(kit, drop, range(100, 150))
        until(lambda: len(seen["first"]) + len(seen["second"]) == 150, "the rest")
        first.stop()
    assert sorted(seen["first"] + seen["second"]) == list(range(150))
    assert seen["second"]


def test_a_partition_that_is_given_up_while_it_is_paused_is_read_when_it_comes_back(
    kit: Any, drop: Callable[..., Drop], until: Until
) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(40))
    has_room = threading.Event()
    seen: set[int] = set()

    def take(message: Message) -> Outcome:
        seen.add(seq_of(message))
        return ACCEPTED

    limits = LoopLimits(max_waiting_messages=1)
    with kit.running(DROPS, lambda message: take(message) if has_room.is_set() else BUSY, limits=limits) as first:
        until(lambda: kit.value("partitions_paused", topic=kit.namespace.topic(DROPS)) == 4, "every partition to be paused")
        with kit.running(DROPS, take) as second:
            until(lambda: len(first.loop._assignment) == len(second.loop._assignment) == 2, "two partitions to move")
            until(lambda: seen, "the second member to read")
            second.stop()
        until(lambda: len(first.loop._assignment) == 4, "the first to have everything again")
        has_room.set()
        publish(kit, drop, range(40, 80))
        until(lambda: seen == set(range(80)), "all messages")
        first.stop()
    assert kit.committed(DROPS) == 80


def test_unfinished_work_of_a_revoked_partition_is_offered_to_its_new_owner(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(40))
    held: list[Completion] = []
    seen: list[int] = []

    def hold(message: Message) -> Outcome:
        held.append(Completion())
        return Accepted(held[-1])

    def take(message: Message) -> Outcome:
        seen.append(seq_of(message))
        return ACCEPTED

    with kit.running(DROPS, hold, limits=LoopLimits(drain_s=0.2)) as first:
        until(lambda: len(held) == 40, "everything held")
        with kit.running(DROPS, take) as second:
            until(lambda: len(second.loop._assignment) == 2, "two partitions to move")
            until(lambda: first.loop._worker.in_flight.count == 40 - len(seen) and seen, "the moved work to be offered again")
            for completion in held:
                completion.done()
            until(lambda: kit.committed(DROPS) == 40, "both members to commit")
            second.stop()
        first.stop()
    assert first.loop._worker.in_flight.count == 0


def test_a_missing_topic_is_an_error_at_the_start(kit: Any) -> None:
    with kit.running(DROPS, lambda message: ACCEPTED) as running, pytest.raises(TopicMissing, match="topics apply"):
        running.join()


def test_a_member_says_which_partitions_it_has_whenever_that_changes(kit: Any, until: Until) -> None:
    kit.create(DROPS)
    mine: dict[str, set[int]] = {}

    def told(member: str) -> Callable[[frozenset[tuple[str, int]]], None]:
        return lambda keys: mine.update({member: {partition for _, partition in keys}})

    with kit.running(DROPS, lambda message: ACCEPTED, on_assignment=told("first")):
        until(lambda: mine.get("first") == {0, 1, 2, 3}, "the first member to have all")
        with kit.running(DROPS, lambda message: ACCEPTED, on_assignment=told("second")) as second:
            until(lambda: len(mine["first"]) == 2 and mine["first"] | mine.get("second", set()) == {0, 1, 2, 3}, "both to share them")
            second.stop()
        assert mine["second"] == set()
        until(lambda: mine["first"] == {0, 1, 2, 3}, "the first member to have all again")


def test_a_static_member_says_goodbye_so_that_nobody_waits_for_its_session(kit: Any, until: Until) -> None:
    kit.create(DROPS)
    with kit.running(DROPS, accept, group_options={"static_member": "first"}, properties=LONG_SESSION) as first:
        until(lambda: first.loop._assignment, "the first assignment")
        with kit.running(DROPS, accept, group_options={"static_member": "second"}, properties=LONG_SESSION) as second:
            until(lambda: len(first.loop._assignment) == len(second.loop._assignment) == 2, "two partitions each")
            second.stop()
            until(lambda: len(first.loop._assignment) == 4, "the first to have everything")
        first.stop()


def test_a_member_that_died_and_comes_back_under_its_name_has_its_partitions_at_once(kit: Any, until: Until) -> None:
    if isinstance(kit.cluster, MemoryCluster):
        pytest.skip("the broker in memory has no sessions")
    kit.create(DROPS)
    with kit.running(DROPS, accept, group_options={"static_member": "first"}, properties=LONG_SESSION) as dead:
        until(lambda: dead.loop._assignment, "the first assignment")
        # The group cannot tell a process that was killed from one that still runs: the later one of a name is the member.
        with kit.running(DROPS, accept, group_options={"static_member": "first"}, properties=LONG_SESSION) as back:
            until(lambda: len(back.loop._assignment) == 4, "all partitions")
            until(lambda: dead.errors, "the earlier one to be told")
            back.stop()
    assert isinstance(dead.errors[0], TransportError)
    assert "Two processes have the same name" in str(dead.errors[0].hint)
