"""Dead letters: copies of messages that a reader cannot use, with their bytes, key and headers, and headers that say what happened.

The header names are those of Kafka Connect (`__connect.errors.*`) and of Spring (`kafka_dlt-*`), so that Kafka UIs and their redrive tools
find them; all values are UTF-8 text, also the numbers. Parts that are too long for a record are cut, and a header says so: if the cluster
refused the copy, the reader would end.

Threads: `DeadLetters.send` may be called from any thread; it blocks only while the publisher's buffer is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo_bus.client.cluster import RawMessage
from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.client.publisher import Publisher, Receipt
from echo_bus.message import raw_headers
from echo_bus.wire import Wire
from echo_schemas.errors import InvalidRecord
from echo_schemas.headers import number_of
from echo_schemas.records import Coordinates
from echo_schemas.topics import Topic

RETRIES = "echo-retries"
"""How often the message was dead-lettered before. A redrive keeps the header, so the next failure adds one."""
REASON = "echo-reason"
TRUNCATED_FROM = "echo-truncated-from"
"""Present only where the original value was cut: its size in bytes. The whole value is at the original offset."""
KEY_TRUNCATED_FROM = "echo-key-truncated-from"
"""Present only where the original key was cut: its size in bytes."""
HEADERS_LEFT_OUT = "echo-headers-left-out"
"""Present only where the original had more headers than a copy may have: how many are missing."""

# With a value of MAX_RECORD_BYTES and our own headers they stay below librdkafka's and every broker's default of a million bytes.
_MOST_KEY_BYTES = 4_096
_MOST_HEADER_BYTES = 32_768
# What a header takes beside its name and value, at most.
_HEADER_OVERHEAD_BYTES = 8
_CONNECT = "__connect.errors."
_SPRING = "kafka_dlt-"
ORIGINAL_TOPIC = _CONNECT + "topic"
_PARTITION, _OFFSET = _CONNECT + "partition", _CONNECT + "offset"
READER = _CONNECT + "connector.name"
"""The consumer group, or the reader, that could not use the message."""
MESSAGE = _CONNECT + "exception.message"
"""The error, as a sentence."""
# These are replaced when a redriven message fails again; the original's other headers stay.
_OURS = (_CONNECT, _SPRING, RETRIES, REASON, TRUNCATED_FROM, KEY_TRUNCATED_FROM, HEADERS_LEFT_OUT)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The record that is written for a message that cannot be read."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


class DeadLetters:
    """Writes the dead letters of one consumer."""

    def __init__(self, publisher: Publisher, wire: Wire, group: str) -> None:
        """`group`: the consumer group, or the reader's name; it tells the operator which reader could not use the message."""
        self._publisher, self._wire, self._group = publisher, wire, group

    def send(self, raw: RawMessage, topic: Topic, invalid: InvalidRecord, whole: bool = True) -> Receipt:
        """Copy `raw` to the topic's dead letters, without its value unless `whole`. Commit the original's offset after the receipt."""
        letter = dead_letter_of(raw, invalid, group=self._group, whole=whole)
        self._wire.metrics.dead_letters.labels(raw.topic(), invalid.reason.value).inc()
        return self._publisher.publish_bytes(self._wire.namespace.dead_letters(topic), letter.value, key=letter.key, headers=letter.headers)


def dead_letter_of(raw: RawMessage, invalid: InvalidRecord, *, group: str, whole: bool = True) -> DeadLetter:
    """The copy of `raw`, cut to the size that every cluster accepts; without its value unless `whole`."""
    key, value, headers = raw.key(), raw.value(), dead_letter_headers(raw, invalid, group=group)
    most = MAX_RECORD_BYTES if whole else 0
    if value is not None and len(value) > most:
        headers.append((TRUNCATED_FROM, b"%d" % len(value)))
        value = value[:most]
    if key is not None and len(key) > _MOST_KEY_BYTES:
        headers.append((KEY_TRUNCATED_FROM, b"%d" % len(key)))
        key = key[:_MOST_KEY_BYTES]
    return DeadLetter(key, value, headers)


def dead_letter_headers(raw: RawMessage, invalid: InvalidRecord, *, group: str) -> list[tuple[str, bytes]]:
    """The original's headers as far as there is room, then the error in Connect's and in Spring's headers."""
    original = raw_headers(raw)
    topic, partition, offset = str(raw.topic()), str(raw.partition()), str(raw.offset())
    error_class = f"{type(invalid).__module__}.{type(invalid).__qualname__}"
    text = {
        ORIGINAL_TOPIC: topic,
        _PARTITION: partition,
        _OFFSET: offset,
        READER: group,
        _CONNECT + "task.id": "0",
        _CONNECT + "stage": "VALUE_CONVERTER",
        _CONNECT + "class.name": "echo_bus.reading.decoding.Decoder",
        _CONNECT + "exception.class.name": error_class,
        MESSAGE: invalid.message,
        _SPRING + "original-topic": topic,
        _SPRING + "original-partition": partition,
        _SPRING + "original-offset": offset,
        _SPRING + "original-timestamp": str(raw.timestamp()[1]),
        _SPRING + "original-consumer-group": group,
        _SPRING + "exception-fqcn": error_class,
        _SPRING + "exception-message": invalid.message,
        REASON: invalid.reason.value,
        RETRIES: str(_retries(original)),
    }
    kept, num_left_out = _fitting([(name, value) for name, value in original if not is_ours(name)])
    if num_left_out:
        text[HEADERS_LEFT_OUT] = str(num_left_out)
    return kept + [(name, value.encode(errors="replace")) for name, value in text.items()]


def is_ours(name: str) -> bool:
    """Whether a dead letter added this header."""
    return name.startswith(_OURS)


def _fitting(headers: list[tuple[str, bytes]]) -> tuple[list[tuple[str, bytes]], int]:
    """The headers for which there is room, in their order, and how many are left out."""
    kept, left = [], _MOST_HEADER_BYTES
    for name, value in headers:
        num_bytes = len(name.encode(errors="replace")) + len(value or b"") + _HEADER_OVERHEAD_BYTES
        if num_bytes <= left:
            kept.append((name, value))
            left -= num_bytes
    return kept, len(headers) - len(kept)


def said_of(headers: Mapping[str, bytes]) -> str:
    """The reason and the error of a dead letter, from its headers."""
    reason, message = headers.get(REASON, b"unknown"), headers.get(MESSAGE, b"")
    return f"{reason.decode(errors='replace')}: {message.decode(errors='replace')}"


def original_place(headers: Mapping[str, bytes]) -> Coordinates | None:
    """Where the message of a dead letter lay, from the letter's headers; None if they do not say."""
    partition, offset = number_of(headers.get(_PARTITION)), number_of(headers.get(_OFFSET))
    return None if partition is None or offset is None else Coordinates(partition=partition, offset=offset)


def _retries(headers: list[tuple[str, bytes]]) -> int:
    """0 for a first failure, else the header's number plus one."""
    return next((number + 1 for name, value in headers if name == RETRIES and (number := number_of(value)) is not None), 0)
