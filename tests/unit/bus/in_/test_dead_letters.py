"""What a dead letter carries, and when there are too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.clock import ManualClock
from echo_bus.dead_letter_budget import DeadLetterBudget, DeadLetterLimits
from echo_bus.dead_letters import DeadLetters, dead_letter_headers
from echo_bus.errors import TooManyDeadLetters
from echo_bus.wire import Wire
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
    return DeadLetters(publisher, Wire(namespace=test_namespace, role="test"), "test.learner")


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
    for strange in (b"many", None, b"", b"9" * 5_000):
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


HOSTILE = [
    (b"k", [("echo-retries", b"9" * 5_000)]),
    (b"k" * 1_000_000, []),
    (None, [("h", b"x" * 1_000_000)]),
    (b"k" * 500_000, [(f"h{number}", b"") for number in range(50_000)]),
    (b"\xff" * 5_000, [("kafka_dlt-exception-message", b"x" * 900_000), ("h", None)]),
]


@pytest.mark.parametrize(("key", "headers"), HOSTILE)
def test_a_copy_is_cut_until_every_cluster_takes_it(
    dead_letters: DeadLetters, recorded: Recorded, make_raw: Callable[..., Any], key: bytes | None, headers: list[tuple[str, Any]]
) -> None:
    raw = make_raw(DROPS, None, key=key, value=b"x" * 2_000_000, headers=headers)
    dead_letters.send(raw, DROPS, InvalidRecord(InvalidReason.KEY_MISMATCH, f"The key is {key!r}."))
    ((_, value, sent_key, sent),) = recorded.published
    named = sum(len(name.encode()) + len(content or b"") + 10 for name, content in sent.items())
    assert len(value or b"") + len(sent_key or b"") + named < 1_000_000
    assert len(sent) < 6_000
    assert sent["kafka_dlt-original-offset"] == b"7"
    assert sent["echo-truncated-from"] == b"2000000"
    assert (key is not None and len(key) > 4_096) == ("echo-key-truncated-from" in sent)


def test_headers_that_are_left_out_are_counted_and_small_ones_stay(
    dead_letters: DeadLetters, recorded: Recorded, make_raw: Callable[..., Any]
) -> None:
    dead_letters.send(
        make_raw(DROPS, None, key=b"k", value=b"", headers=[("big", b"x" * 50_000), ("traceparent", b"00-ab")]), DROPS, INVALID
    )
    ((_, _, _, headers),) = recorded.published
    assert headers["traceparent"] == b"00-ab"
    assert "big" not in headers
    assert headers["echo-headers-left-out"] == b"1"


def test_a_copy_above_the_budget_says_where_the_message_lies(
    dead_letters: DeadLetters, recorded: Recorded, make_raw: Callable[..., Any]
) -> None:
    dead_letters.send(make_raw(DROPS, None, key=b"k", value=b"garbage", headers=[]), DROPS, INVALID, whole=False)
    ((_, value, key, headers),) = recorded.published
    assert (value, key) == (b"", b"k")
    assert headers["echo-truncated-from"] == b"7"
    assert headers["__connect.errors.offset"] == b"7"


@pytest.fixture
def garbage(make_raw: Callable[..., Any]) -> Callable[[str], Any]:
    def make(writer: str) -> Any:
        return make_raw(DROPS, None, key=b"k", value=b"garbage", headers=[("ce_source", writer.encode())])

    return make


def test_a_reader_goes_on_however_many_it_cannot_read(garbage: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Whole up to the budget of each writer; above it one line, and at the end of the minute how many there were."""
    clock = ManualClock()
    budget = DeadLetterBudget(DeadLetterLimits(per_writer=3), clock)
    assert [budget.count_invalid(garbage("mallory"), INVALID) for _ in range(1_000)] == [True] * 3 + [False] * 997
    assert budget.count_invalid(garbage("alice"), INVALID)
    assert len(caplog.records) == 5
    assert "mallory writes what cannot be read" in caplog.text
    clock.advance(61.0)
    budget.count_valid()
    assert "997 further messages of mallory" in caplog.text
    assert budget.count_invalid(garbage("mallory"), INVALID)


def test_writers_with_ever_new_names_share_what_all_may_have(garbage: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    budget = DeadLetterBudget(DeadLetterLimits(per_writer=3, per_minute=100), ManualClock())
    whole = [budget.count_invalid(garbage(f"name-{number}"), INVALID) for number in range(5_000)]
    assert sum(whole) <= 100
    assert len(caplog.records) < 200


def test_a_cluster_without_strangers_may_want_to_stop(garbage: Callable[[str], Any]) -> None:
    budget = DeadLetterBudget(DeadLetterLimits(stop_after=3), ManualClock())
    for _ in range(20):
        budget.count_invalid(garbage("a"), INVALID)
        budget.count_invalid(garbage("b"), INVALID)
        budget.count_valid()
    budget.count_valid(0)
    for _ in range(3):
        budget.count_invalid(garbage("a"), INVALID)
    with pytest.raises(TooManyDeadLetters, match=r"4 messages in a row .*The bytes end too soon.*STOP_AFTER=0"):
        budget.count_invalid(garbage("a"), INVALID)


@pytest.mark.parametrize("wrong", [{"per_writer": -1}, {"per_minute": -1}, {"stop_after": -1}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="make no sense"):
        DeadLetterLimits(**wrong)
