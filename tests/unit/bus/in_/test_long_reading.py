"""Reading to an end that is far away: as long as something comes, and not in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline, ManualClock
from echo_bus.errors import DeadlineExceeded
from echo_bus.message import Message
from echo_bus.reading.reader import LogReader
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop
from echo_schemas.topics import DROPS

NUM_DROPS = 400
SLOW_S = 20.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reader(clock: ManualClock, make_drop: Callable[..., Drop]) -> LogReader:
    """At the beginning of four hundred drops."""
    cluster = MemoryCluster()
    bus = Bus(cluster=cluster, namespace=Namespace("test"), clock=clock, role="view", run_id="demo")
    for created in cluster.admin().create_topics([NewTopic("test.drops", 1, 1)]).values():
        created.result(5)
    publisher = bus.publisher(profiles.PRODUCER_LATENCY)
    for seq in range(NUM_DROPS):
        publisher.publish(DROPS, make_drop(seq))
    publisher.close()
    made = bus.look([DROPS])
    made.start()
    return made


def read_slowly(reader: LogReader, clock: ManualClock, *, patience_s: float) -> list[Message]:
    """Every batch takes twenty seconds."""
    at_once = reader.read

    def read(max_messages: int = 100, timeout_s: float = 1.0) -> list[Message]:
        clock.advance(SLOW_S)
        return at_once(max_messages, timeout_s)

    reader.read = read  # type: ignore[method-assign]
    return [message for batch in reader.read_to_end(Deadline.after(patience_s, clock)) for message in batch]


def test_what_comes_slowly_is_waited_for_and_told_of(reader: LogReader, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "echo_bus.reading.reading_note"):
        assert len(read_slowly(reader, clock, patience_s=30.0)) == NUM_DROPS
    assert clock.monotonic_s() > 60
    assert caplog.messages[0] == "Reading drops: 100 of 400 (25 %), about 60 s left"
    assert caplog.messages[-1].startswith("Read drops: 400 records in ")


def test_what_does_not_come_at_all_is_given_up(reader: LogReader, clock: ManualClock) -> None:
    reader.pause(reader.places)
    with pytest.raises(DeadlineExceeded, match="Nothing of the log came for 30 s"):
        read_slowly(reader, clock, patience_s=30.0)


def test_what_is_there_at_once_is_read_without_a_word(reader: LogReader, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "echo_bus.reading.reading_note"):
        assert sum(map(len, reader.read_to_end(Deadline.after(5)))) == NUM_DROPS
    assert not caplog.messages
