"""Every kind of bad input has its reason; other runs are passed by; sound messages arrive whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from echo_bus.dead_letters import dead_letter_of
from echo_bus.reading.decoding import Decoder
from echo_bus.wire import Wire
from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.naming import Namespace
from echo_schemas.partitioning import partition_of
from echo_schemas.records import Coordinates, Drop, Progress, Reward, RewardOutcome
from echo_schemas.topics import DROPS, PROGRESS, REWARDS, Topic

NUM_PARTITIONS = 4
TOPICS = (DROPS, PROGRESS, REWARDS)

PROGRESS_RECORD = Progress(
    run_id="demo", session="a", version=2, published=1, groups_trained=0, groups_dropped=0, groups_ready=0, next_seq=0, time_ms=1
)


@pytest.fixture
def decoder(test_namespace: Namespace) -> Decoder:
    decoder = Decoder(Wire(namespace=test_namespace, role="test", run_id="demo"), TOPICS)
    decoder.set_num_partitions({test_namespace.topic(topic): NUM_PARTITIONS for topic in TOPICS})
    return decoder


def reason_of(decoder: Decoder, raw: Any) -> InvalidReason:
    with pytest.raises(InvalidRecord) as caught:
        decoder.decode(raw)
    return caught.value.reason


@pytest.mark.parametrize("error", [RecursionError("too deep"), MemoryError(), OverflowError("too large"), AssertionError()])
def test_whatever_looking_at_a_message_raises_makes_it_invalid(
    decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    raw = make_raw(DROPS, make_drop(4))
    for owner, name in ((Drop, "validate"), (Decoder, "_judge")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            with pytest.raises(InvalidRecord, match=type(error).__name__):
                decoder.decode(raw)


def test_a_message_that_quotes_a_stranger_is_short(decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    with pytest.raises(InvalidRecord) as caught:
        decoder.decode(make_raw(DROPS, make_drop(4), key=b"k" * 1_000_000))
    assert len(caught.value.message) <= 1_000


def test_a_sound_message_arrives_whole(decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    message = decoder.decode(make_raw(DROPS, make_drop(4), offset=11))
    assert message is not None
    assert message.record == make_drop(4)
    assert (message.topic, message.key, message.timestamp_ms) == (DROPS, "demo/4", 1234)
    assert message.coordinates == Coordinates(partition=partition_of("demo/4", NUM_PARTITIONS), offset=11)
    assert message.headers["echo-run"] == b"demo"
    assert "echo-group" in message.headers
    assert len(message.headers) == 7
    assert message.num_bytes > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": None}, InvalidReason.NULL_VALUE),
        ({"value": b"\x00\x01"}, InvalidReason.TRUNCATED),
        ({"value": b"{ 'a': 1 }"}, InvalidReason.BAD_MAGIC),
        ({"value": b"\x00\x7f\xff\xff\xffbody"}, InvalidReason.UNKNOWN_SCHEMA),
        ({"key": b"demo/5"}, InvalidReason.KEY_MISMATCH),
        ({"key": b"demo/\xff"}, InvalidReason.KEY_MISMATCH),
        ({"key": None}, InvalidReason.KEY_MISMATCH),
        ({"partition": (partition_of("demo/4", NUM_PARTITIONS) + 1) % NUM_PARTITIONS}, InvalidReason.PARTITION_MISMATCH),
    ],
)
def test_bad_input_has_a_reason(
    decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop], change: dict[str, Any], reason: InvalidReason
) -> None:
    assert reason_of(decoder, make_raw(DROPS, make_drop(4), **change)) == reason


@pytest.mark.parametrize("run_id", ["demo", None])
def test_a_filler_of_a_restored_run_is_no_bad_input(test_namespace: Namespace, make_raw: Callable[..., Any], run_id: str | None) -> None:
    decoder = Decoder(Wire(namespace=test_namespace, role="test", run_id=run_id), TOPICS)
    assert decoder.decode(make_raw(DROPS, None, key=b"-/filler", headers=[("echo-run", b"-")])) is None


def test_a_cut_body_is_truncated(decoder: Decoder, codec: Codec, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    assert reason_of(decoder, make_raw(DROPS, make_drop(4), value=codec.encode(make_drop(4))[:-2])) == InvalidReason.TRUNCATED


def test_a_record_of_another_topic_is_unexpected(
    decoder: Decoder, codec: Codec, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    raw = make_raw(DROPS, make_drop(4), value=codec.encode(PROGRESS_RECORD))
    assert reason_of(decoder, raw) == InvalidReason.UNEXPECTED_RECORD


def test_another_run_is_passed_by_on_its_header_without_decoding(
    decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    assert decoder.decode(make_raw(DROPS, make_drop(4, run_id="other"), value=b"not even Avro")) is None


def test_another_run_whose_key_begins_like_ours_is_passed_by_on_its_body(
    decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    assert decoder.decode(make_raw(DROPS, make_drop(4, run_id="demo/x"))) is None


def test_another_run_without_headers_is_passed_by_on_its_body(
    decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    assert decoder.decode(make_raw(DROPS, make_drop(4, run_id="other"), headers=None)) is None


def test_without_a_run_every_run_is_read(test_namespace: Namespace, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    message = Decoder(Wire(namespace=test_namespace, role="test"), TOPICS).decode(make_raw(DROPS, make_drop(4, run_id="other")))
    assert message is not None
    assert message.record == make_drop(4, run_id="other")


def test_partitions_are_not_compared_before_their_number_is_known(
    test_namespace: Namespace, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    decoder = Decoder(Wire(namespace=test_namespace, role="test"), TOPICS)
    assert decoder.decode(make_raw(DROPS, make_drop(4), partition=3, key=b"demo/4")) is not None


def test_a_placed_topic_lets_the_writer_choose_the_partition(decoder: Decoder, make_raw: Callable[..., Any]) -> None:
    reward = Reward(
        run_id="demo", group_id="demo/1", seq=1, attempt="a", index=0, of=Coordinates(partition=1, offset=2),
        name="exact", code_version="1", outcome=RewardOutcome.SCORED, value=1.0, time_ms=1,
    )  # fmt: skip
    for partition in range(NUM_PARTITIONS):
        assert decoder.decode(make_raw(REWARDS, reward, partition=partition)) is not None


@pytest.mark.parametrize("topic", [PROGRESS])
def test_a_tombstone_is_a_message_without_a_record(decoder: Decoder, make_raw: Callable[..., Any], topic: Topic) -> None:
    message = decoder.decode(make_raw(topic, None, key=b"demo", partition=partition_of("demo", NUM_PARTITIONS)))
    assert message is not None
    assert message.record is None
    assert message.key == "demo"


def test_a_tombstone_needs_a_key(decoder: Decoder, make_raw: Callable[..., Any]) -> None:
    assert reason_of(decoder, make_raw(PROGRESS, None, key=None)) == InvalidReason.KEY_MISMATCH


def test_null_header_values_are_left_out(decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]) -> None:
    message = decoder.decode(make_raw(DROPS, make_drop(4), headers=[("a", None), ("b", b"1"), ("b", b"2")]))
    assert message is not None
    assert dict(message.headers) == {"b": b"2"}


def test_headers_that_the_client_cannot_read_are_asked_for_once(
    decoder: Decoder, make_raw: Callable[..., Any], make_drop: Callable[..., Drop]
) -> None:
    """A name that is no UTF-8: confluent-kafka raises the first time, and ends the process the second time unless it was told to forget."""

    class Unreadable:
        """A message of the client's with such a name."""

        def __init__(self, raw: Any) -> None:
            self._raw = raw
            self.num_asked = 0
            self.headers_now: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._raw, name)

        def headers(self) -> Any:
            if self.headers_now is None:
                self.num_asked += 1
                assert self.num_asked == 1, "a segmentation fault"
                raise SystemError("returned a result with an exception set")
            return self.headers_now

        def set_headers(self, headers: Any) -> None:
            self.headers_now = headers

    message = decoder.decode(Unreadable(make_raw(DROPS, make_drop(4))))
    assert message is not None
    assert dict(message.headers) == {}
    raw = Unreadable(make_raw(DROPS, make_drop(4), key=b"other"))
    with pytest.raises(InvalidRecord) as caught:
        decoder.decode(raw)
    assert dict(dead_letter_of(raw, caught.value, group="g").headers)["kafka_dlt-original-offset"] == b"7"
