"""What a dead letter carries, and when there are too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from echo_bus.dead_letters import DeadLetterBudget, DeadLetterLimits, DeadLetters, dead_letter_headers
from echo_bus.errors import TooManyDeadLetters
from echo_bus.metrics import BusMetrics
from echo_bus.profiles import MAX_RECORD_BYTES
from echo_schemas.errors import InvalidReason, InvalidRecord, UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop
from echo_schemas.topics import DROPS

INVALID = InvalidRecord(InvalidReason.TRUNCATED, "The bytes end too soon.")


class Recorded:
    """A publisher that keeps what it was given."""

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes | None, bytes | None, dict[str, bytes]]] = []

    def publish_bytes(
        self, physical: str, value: bytes | None, *, key: bytes | None = None, headers: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        self.published.append((physical, value, key, dict(headers)))


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def dead_letters(recorded: Recorded, test_namespace: Namespace) -> DeadLetters:
    publisher: Any = recorded
    return DeadLetters(publisher, namespace=test_namespace, group="test.learner", metrics=BusMetrics(CollectorRegistry()))


def test_a_dead_letter_keeps_bytes_key_and_headers_and_says_what_happened(
    dead_letters: DeadLetters, recorded: Recorded, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    raw = make_raw(DROPS, make_drop(4), value=b"\x00broken", headers=[("traceparent", b"00-ab")], partition=2, offset=99)
    dead_letters.send(raw, DROPS, INVALID)
    ((physical, value, key, headers),) = recorded.published
    assert (physical, value, key) == ("test.drops.dlq", b"\x00broken", b"demo/4")
    assert headers["traceparent"] == b"00-ab"
    assert headers["__connect.errors.topic"] == headers["kafka_dlt-original-topic"] == b"test.drops"
    assert headers["__connect.errors.partition"] == headers["kafka_dlt-original-partition"] == b"2"
    assert headers["__connect.errors.offset"] == headers["kafka_dlt-original-offset"] == b"99"
    assert headers["__connect.errors.exception.message"] == headers["kafka_dlt-exception-message"] == b"The bytes end too soon."
    assert headers["kafka_dlt-original-consumer-group"] == b"test.learner"
    assert headers["kafka_dlt-original-timestamp"] == b"1234"
    assert headers["echo-reason"] == b"truncated"
    assert headers["echo-retries"] == b"0"
    assert "echo-truncated-from" not in headers


def test_a_redriven_message_counts_on_and_its_old_errors_are_replaced(make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    first = dead_letter_headers(make_raw(DROPS, make_drop(4), headers=[("traceparent", b"00-ab")]), INVALID, group="a")
    second = dead_letter_headers(make_raw(DROPS, make_drop(4), headers=first, offset=500), INVALID, group="b")
    assert len(second) == len(first) == len(dict(second))
    assert dict(second)["echo-retries"] == b"1"
    assert dict(second)["kafka_dlt-original-offset"] == b"500"
    assert dict(second)["traceparent"] == b"00-ab"


def test_a_retry_count_that_is_no_number_starts_again(make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    for strange in (b"many", None, b""):
        headers = dead_letter_headers(make_raw(DROPS, make_drop(4), headers=[("echo-retries", strange)]), INVALID, group="a")
        assert dict(headers)["echo-retries"] == b"0"


def test_a_value_above_the_record_limit_is_cut_and_says_so(
    dead_letters: DeadLetters, recorded: Recorded, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    dead_letters.send(make_raw(DROPS, make_drop(4), value=b"x" * (MAX_RECORD_BYTES + 5)), DROPS, INVALID)
    ((_, value, _, headers),) = recorded.published
    assert value is not None
    assert len(value) == MAX_RECORD_BYTES
    assert headers["echo-truncated-from"] == str(MAX_RECORD_BYTES + 5).encode()


def test_too_many_in_a_row_stop_the_consumer() -> None:
    budget = DeadLetterBudget(DeadLetterLimits(max_consecutive=3, max_ratio=1.0))
    for _ in range(3):
        budget.count_invalid(INVALID)
    with pytest.raises(TooManyDeadLetters, match=r"4 messages in a row .*The bytes end too soon"):
        budget.count_invalid(INVALID)


def test_a_valid_message_ends_a_row() -> None:
    budget = DeadLetterBudget(DeadLetterLimits(max_consecutive=3, max_ratio=1.0))
    for _ in range(20):
        budget.count_invalid(INVALID)
        budget.count_invalid(INVALID)
        budget.count_valid()
    budget.count_valid(0)
    for _ in range(3):
        budget.count_invalid(INVALID)
    with pytest.raises(TooManyDeadLetters):
        budget.count_invalid(INVALID)


def test_too_large_a_share_stops_the_consumer_once_enough_were_judged() -> None:
    budget = DeadLetterBudget(DeadLetterLimits(max_ratio=0.1, min_messages=100))
    budget.count_valid(80)
    for _ in range(19):
        budget.count_invalid(INVALID)
    with pytest.raises(TooManyDeadLetters, match="20 of the last 100 messages"):
        budget.count_invalid(INVALID)


def test_old_messages_leave_the_window() -> None:
    """A bad patch long ago must not hide in a good average, nor a good past excuse a bad present."""
    budget = DeadLetterBudget(DeadLetterLimits(max_ratio=0.1, window=200, max_consecutive=1_000))
    budget.count_valid(1_000_000)
    for _ in range(200):
        budget.count_invalid(INVALID)
    with pytest.raises(TooManyDeadLetters, match="201 of the last 201"):
        budget.count_invalid(INVALID)


def test_a_steady_share_below_the_limit_never_stops() -> None:
    budget = DeadLetterBudget(DeadLetterLimits(max_ratio=0.1))
    for _ in range(2_000):
        budget.count_valid(19)
        budget.count_invalid(INVALID)


@pytest.mark.parametrize("wrong", [{"max_ratio": 1.5}, {"max_consecutive": -1}, {"window": 0}, {"min_messages": 0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="make no sense"):
        DeadLetterLimits(**wrong)
