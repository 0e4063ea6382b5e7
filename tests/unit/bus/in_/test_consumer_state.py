"""The hand-over between the threads is bounded by messages and by bytes; the loop's limits leave room for at least one message."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from echo_bus.group.state import FetchedBatch, Handover, InFlight, LoopLimits
from echo_schemas.errors import UserError

RAW: Any = object()


def batch(num_messages: int, num_bytes: int) -> FetchedBatch:
    return FetchedBatch({}, [RAW] * num_messages, num_bytes)


def test_room_shrinks_with_what_is_handed_over_and_grows_with_what_is_worked_through() -> None:
    handover = Handover(max_messages=10, max_bytes=1_000)
    assert handover.room() == 10
    handover.give(batch(6, 60))
    assert (handover.room(), handover.num_messages, handover.num_bytes) == (4, 6, 60)
    assert not handover.is_half_empty()
    taken = handover.take(0)
    assert isinstance(taken, FetchedBatch)
    assert handover.room() == 4, "taken is not worked through"
    handover.finished(taken)
    assert handover.room() == 10
    assert handover.is_half_empty()


def test_bytes_bound_the_hand_over_too() -> None:
    handover = Handover(max_messages=10, max_bytes=1_000)
    handover.give(batch(1, 1_000))
    assert handover.room() == 0
    assert not handover.is_half_empty()


def test_an_empty_hand_over_gives_nothing() -> None:
    assert Handover(max_messages=1, max_bytes=1).take(0) is None


def test_waiting_for_room_ends_when_the_worker_has_caught_up() -> None:
    handover = Handover(max_messages=1, max_bytes=1_000)
    handover.give(batch(1, 1))
    assert not handover.wait_for_room(0.001)
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(handover.wait_for_room(60)))
    waiter.start()
    taken = handover.take(1)
    assert isinstance(taken, FetchedBatch)
    handover.finished(taken)
    waiter.join(60)
    assert found == [True]


def test_work_in_flight_is_waited_for() -> None:
    in_flight = InFlight()
    in_flight.add()
    in_flight.add()
    assert not in_flight.wait_below(2, 0)
    in_flight.subtract()
    assert in_flight.wait_below(2, 0)
    assert in_flight.count == 1


@pytest.mark.parametrize("name", ["max_queued_messages", "max_queued_bytes", "max_in_flight", "batch_size"])
def test_limits_without_room_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="no room for a message"):
        LoopLimits(**{name: 0})
