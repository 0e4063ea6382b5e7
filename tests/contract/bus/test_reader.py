"""Reading without a group: positions are exact, lost offsets are errors, transactions are whole or absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from echo_bus.client.profiles import TRANSACTIONAL
from echo_bus.clock import Deadline
from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.dead_letters import DeadLetters
from echo_bus.errors import DeadlineExceeded, OffsetLost, TooManyDeadLetters, TopicMissing
from echo_bus.message import Message
from echo_bus.reading.reader import From, Isolation, LogReader
from echo_schemas.headers import headers_of
from echo_schemas.records import Drop
from echo_schemas.topics import DROPS
from tests.contract.bus.conftest import PATIENCE_S

Until = Callable[[Callable[[], object], str], None]


def publish(kit: Any, drop: Callable[..., Drop], seqs: range, run_id: str = "demo") -> None:
    publisher = kit.publisher()
    for seq in seqs:
        publisher.publish(DROPS, drop(seq, run_id))
    publisher.flush(PATIENCE_S)


def read_all(reader: LogReader) -> list[Message]:
    return [message for batch in reader.read_to_end(Deadline.after(PATIENCE_S)) for message in batch]


def seqs_of(messages: list[Message]) -> list[int]:
    return sorted(message.record.seq for message in messages if isinstance(message.record, Drop))


def test_everything_is_read_to_the_end_and_the_positions_say_so(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(300))
    reader = kit.reader(DROPS)
    reader.start()
    messages = read_all(reader)
    assert seqs_of(messages) == list(range(300))
    for place in reader.places:
        offsets = [message.offset for message in messages if message.partition == place[1]]
        assert offsets == list(range(len(offsets)))
    assert reader.positions == reader.end_offsets()


def test_a_reader_goes_on_from_the_positions_of_another(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(100))
    first = kit.reader(DROPS)
    first.start()
    early: list[Message] = []
    while len(early) < 10:
        early += first.read(max_messages=7)
    second = kit.reader(DROPS)
    second.start(first.positions)
    assert seqs_of(early + read_all(second)) == list(range(100))


def test_from_the_end_only_what_comes_later_is_read(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(10))
    reader = kit.reader(DROPS)
    reader.start(otherwise=From.END)
    publish(kit, drop, range(10, 15))
    found: list[Message] = []

    def read() -> bool:
        found.extend(reader.read(timeout_s=0.1))
        return len(found) >= 5

    until(read, "five messages")
    assert seqs_of(found) == list(range(10, 15))


def test_starting_again_goes_back(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(20))
    reader = kit.reader(DROPS)
    for _ in range(2):
        reader.start()
        assert seqs_of(read_all(reader)) == list(range(20))


def test_one_partition_is_read_again_from_an_offset_and_the_others_go_on(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(100))
    reader = kit.reader(DROPS)
    reader.start()
    everything = read_all(reader)
    place = (DROPS.name, everything[0].partition)
    whole = [message.offset for message in everything if message.partition == place[1]]
    assert reader.go_back({place: 3}) == {place: 3}
    assert reader.positions[place] == 3
    again: list[Message] = []

    def is_read() -> bool:
        again.extend(reader.read(timeout_s=0.1))
        return reader.positions[place] == len(whole) and place in reader.take_ends()

    until(is_read, "the partition is read to its end again")
    assert [(message.partition, message.offset) for message in again] == [(place[1], offset) for offset in whole[3:]]


def test_what_cannot_be_read_is_told_once(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(5))
    publisher = kit.publisher()
    publisher.publish_bytes(kit.namespace.topic(DROPS), b"rubbish", key=b"demo/9", partition=0)
    publisher.flush(PATIENCE_S)
    publish(kit, drop, range(5, 10))
    told: list[int | None] = []
    reader = kit.reader(DROPS, on_invalid=lambda raw, topic, invalid, is_within: told.append(raw.offset()))
    reader.start()
    assert len(read_all(reader)) == 10
    reader.go_back({(DROPS.name, 0): 2})
    again: list[Message] = []

    def is_read() -> bool:
        again.extend(reader.read(timeout_s=0.1))
        return len(again) == 8

    until(is_read, "all is read again")
    assert told == [5]


def test_going_back_behind_retention_begins_at_the_first_record(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(100))
    reader = kit.reader(DROPS)
    reader.start()
    assert len(read_all(reader)) == 100
    place = (DROPS.name, 0)
    admin = kit.cluster.admin()
    for deleted in admin.delete_records([TopicPartition(kit.namespace.topic(DROPS), place[1], 5)]).values():
        deleted.result(PATIENCE_S)
    assert reader.go_back({place: 0}) == {place: 5}
    assert reader.positions[place] == 5


def test_bounds_say_where_partitions_begin_and_end_and_move_nothing(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(50))
    reader = kit.reader(DROPS)
    bounds = reader.bounds()
    assert {low for low, _ in bounds.values()} == {0}
    assert sum(end for _, end in bounds.values()) == 50
    assert {place: end for place, (_, end) in bounds.items()} == reader.start()
    publish(kit, drop, range(50, 60))
    assert sum(end for _, end in reader.bounds().values()) == 60
    assert len(read_all(reader)) >= 50


def test_an_end_is_seen_once_and_again_only_where_it_is_looked_for_and_can_be_reached(
    kit: Any, drop: Callable[..., Drop], until: Until
) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(40))
    reader = kit.reader(DROPS)
    reader.start()
    everywhere = frozenset(reader.places)
    read_all(reader)
    seen: set[Any] = set()

    def reads_and_sees(looking: frozenset[Any], wanted: frozenset[Any]) -> Callable[[], bool]:
        def look() -> bool:
            read.extend(reader.read(timeout_s=0.1))
            seen.update(reader.take_ends(looking))
            return wanted <= seen

        read: list[Message] = []
        return look

    until(reads_and_sees(frozenset(), everywhere), "every end")
    seen.clear()
    one = frozenset(reader.places[:1])
    until(reads_and_sees(one, one), "the end that was looked for, again")
    assert seen == one
    assert reader.positions == reader.end_offsets()
    reader.pause(everywhere)
    reader.take_ends()
    publish(kit, drop, range(40, 80))
    for _ in range(5):
        assert reader.read(timeout_s=0.1) == []
        assert not reader.take_ends(everywhere), "nobody knows where a paused partition ends"
    reader.resume(everywhere)
    assert seqs_of(read_all(reader)) == list(range(40, 80))
    seen.clear()
    until(reads_and_sees(everywhere, everywhere), "every end, behind what came meanwhile")
    assert reader.positions == reader.end_offsets()


def test_an_empty_topic_ends_at_once(kit: Any) -> None:
    kit.create(DROPS)
    reader = kit.reader(DROPS)
    reader.start()
    assert read_all(reader) == []


def test_positions_outside_the_log_are_lost(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(10))
    admin = kit.cluster.admin()
    for deleted in admin.delete_records([TopicPartition(kit.namespace.topic(DROPS), 0, 4)]).values():
        deleted.result(PATIENCE_S)
    reader = kit.reader(DROPS)
    with pytest.raises(OffsetLost, match="offsets 1 to 3 are past its retention"):
        reader.start({("drops", 0): 1})
    with pytest.raises(OffsetLost, match="not the topic it was"):
        reader.start({("drops", 0): 11})
    with pytest.raises(TopicMissing, match="no partition 5"):
        reader.start({("drops", 5): 0})
    reader.start({("drops", 0): 4})
    assert seqs_of(read_all(reader)) == list(range(4, 10))


def test_a_record_that_is_written_while_offsets_are_asked_by_time_is_not_passed_by(
    kit: Any, drop: Callable[..., Drop], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.create(DROPS, num_partitions=1)
    reader = kit.reader(DROPS)
    ask = reader.end_offsets

    def write_and_ask() -> dict[Any, int]:
        publish(kit, drop, range(1))
        ends: dict[Any, int] = ask()
        return ends

    monkeypatch.setattr(reader, "end_offsets", write_and_ask)
    assert reader.offsets_at(0) == {("drops", 0): 0}


def test_offsets_by_time(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS, num_partitions=1)
    publish(kit, drop, range(3))
    reader = kit.reader(DROPS)
    assert reader.offsets_at(0) == {("drops", 0): 0}
    assert reader.offsets_at(kit.clock.time_ms() + 3_600_000) == {("drops", 0): 3}


def test_a_paused_partition_waits_and_the_others_are_read(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS)
    reader = kit.reader(DROPS)
    reader.start()
    assert read_all(reader) == []
    paused = {reader.places[1]}
    reader.pause(paused)
    publish(kit, drop, range(40))
    ends = {place: end for place, end in kit.reader(DROPS).start().items() if place not in paused}
    others = [message for batch in reader.read_to_end(Deadline.after(PATIENCE_S), ends) for message in batch]
    assert {message.partition for message in others} == {place[1] for place in reader.places} - {1}
    assert reader.read(timeout_s=0.3) == []
    reader.resume(paused)
    rest = read_all(reader)
    assert {message.partition for message in rest} == {1}
    assert seqs_of(others + rest) == list(range(40))


def test_bad_messages_go_to_the_dead_letters_and_reading_goes_on(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS, num_partitions=1)
    publisher = kit.publisher()
    publish(kit, drop, range(2))
    publisher.publish_bytes(kit.namespace.topic(DROPS), None, key=b"demo/9", partition=0)
    publisher.flush(PATIENCE_S)
    publish(kit, drop, range(2, 4))
    letters = DeadLetters(publisher, kit.bus, "reader")
    reader = kit.reader(DROPS, on_invalid=letters.send)
    reader.start()
    assert seqs_of(read_all(reader)) == [0, 1, 2, 3]
    assert reader.positions == {("drops", 0): 5}
    assert kit.value("dead_letters_total", topic=kit.namespace.topic(DROPS), reason="null_value") == 1


def test_too_many_bad_messages_stop_the_reader(kit: Any) -> None:
    kit.create(DROPS, num_partitions=1)
    publisher = kit.publisher()
    for _ in range(20):
        publisher.publish_bytes(kit.namespace.topic(DROPS), b"garbage", key=b"demo/9", partition=0)
    publisher.flush(PATIENCE_S)
    reader = kit.reader(DROPS, limits=DeadLetterLimits(stop_after=5))
    reader.start()
    with pytest.raises(TooManyDeadLetters):
        read_all(reader)


def test_other_runs_move_the_position_only(kit: Any, drop: Callable[..., Drop]) -> None:
    kit.create(DROPS)
    publish(kit, drop, range(10), run_id="yesterday")
    reader = kit.reader(DROPS, run_id="demo")
    reader.start()
    assert read_all(reader) == []
    assert sum(reader.positions.values()) == 10
    assert kit.value("records_ignored_total", topic=kit.namespace.topic(DROPS), reason="other_run") == 10


def test_committed_records_are_whole_and_aborted_ones_absent(kit: Any, drop: Callable[..., Drop], until: Until) -> None:
    kit.create(DROPS, num_partitions=1)
    producer = kit.cluster.producer({**TRANSACTIONAL, "transactional.id": kit.namespace.transactional_id("learner")})
    producer.init_transactions(PATIENCE_S)
    for seqs, commits in ((range(3), True), (range(3, 6), False)):
        producer.begin_transaction()
        for seq in seqs:
            record = drop(seq)
            producer.produce(
                kit.namespace.topic(DROPS),
                kit.codec.encode(record),
                DROPS.key_of(record),
                headers=headers_of(record, source="learner", time_ms=1),
            )
        producer.flush(PATIENCE_S)
        if commits:
            producer.commit_transaction(PATIENCE_S)
        else:
            producer.abort_transaction(PATIENCE_S)
    reader = kit.reader(DROPS)
    # A broker answers a commit before it has written the marker.
    until(lambda: reader.end_offsets() == {("drops", 0): 8}, "three, a marker, three aborted, a marker")
    reader.start()
    assert seqs_of(read_all(reader)) == [0, 1, 2]
    assert reader.positions == {("drops", 0): 8}
    every = kit.reader(DROPS, isolation=Isolation.UNCOMMITTED)
    every.start()
    assert seqs_of(read_all(every)) == [0, 1, 2, 3, 4, 5]


def test_an_end_that_does_not_come_is_an_error(kit: Any) -> None:
    kit.create(DROPS, num_partitions=1)
    reader = kit.reader(DROPS)
    reader.start()
    reader.pause(reader.places)
    with pytest.raises(DeadlineExceeded, match="position and end"):
        list(reader.read_to_end(Deadline.after(0.2), {("drops", 0): 5}))


def test_a_missing_topic_is_an_error_at_once(kit: Any) -> None:
    with pytest.raises(TopicMissing, match="topics apply"):
        kit.reader(DROPS)
