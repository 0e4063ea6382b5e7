"""Where messages go that nobody can read: the original bytes, key and headers, and headers that say what happened.

The header names are those of Kafka Connect (`__connect.errors.*`) and of Spring (`kafka_dlt-*`), so that Kafka UIs and their redrive tools
find them; all values are UTF-8 text, the numbers too. `DeadLetterBudget` bounds how many there may be, so that a bad deployment stops
instead of draining the topic.

Threads: the budget belongs to the one thread that judges messages. `DeadLetters.send` may be called from any thread; it blocks only while
the publisher's buffer is full. `send_and_wait` blocks until the copy is acknowledged, which the publisher's own thread learns.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from echo_bus.cluster import RawMessage
from echo_bus.errors import TooManyDeadLetters
from echo_bus.metrics import BusMetrics
from echo_bus.profiles import MAX_RECORD_BYTES
from echo_bus.publisher import Publisher, Receipt
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.naming import Namespace
from echo_schemas.topics import Topic

logger = logging.getLogger(__name__)

RETRIES = "echo-retries"
"""How often the message was dead-lettered before: a redrive keeps the header, so the next failure counts on."""
REASON = "echo-reason"
TRUNCATED_FROM = "echo-truncated-from"
"""Present only where the original value was above our record limit: its size in bytes. The whole value is at the original offset."""

# As long as any producer's own delivery time-out.
_ACKNOWLEDGED_S = 120.0
_CONNECT = "__connect.errors."
_SPRING = "kafka_dlt-"
# Ours are replaced when a redriven message fails again; everything else is the original's and stays.
_OURS = (_CONNECT, _SPRING, RETRIES, REASON, TRUNCATED_FROM)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterLimits:
    """How many messages may be invalid before the consumer stops.

    The ratio is taken over the last `window` to 2 x `window` messages, and not before `min_messages` were judged.
    """

    max_ratio: float = 0.1
    max_consecutive: int = 100
    window: int = 1_000
    min_messages: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.max_ratio <= 1 or self.max_consecutive < 0 or self.window < 1 or self.min_messages < 1:
            raise UserError(
                f"These limits on dead letters make no sense: {self}.",
                hint="max_ratio lies in [0, 1], max_consecutive is not negative, window and min_messages are at least 1.",
            )


class DeadLetterBudget:
    """Counts valid and invalid messages against the limits, in constant memory."""

    def __init__(self, limits: DeadLetterLimits | None = None) -> None:
        self._limits = limits or DeadLetterLimits()
        self._consecutive = 0
        self._invalid = self._judged = 0
        self._earlier_invalid = self._earlier_judged = 0

    def count_valid(self, num_messages: int = 1) -> None:
        """`num_messages` were readable. Called per batch."""
        if num_messages > 0:
            self._consecutive = 0
            self._judge(num_messages, 0)

    def count_invalid(self, cause: InvalidRecord) -> None:
        """One message was not. Raises TooManyDeadLetters if that is more than the limits allow: it should then not be dead-lettered."""
        self._consecutive += 1
        self._judge(1, 1)
        limits = self._limits
        if self._consecutive > limits.max_consecutive:
            raise self._too_many(f"{self._consecutive} messages in a row were invalid (limit {limits.max_consecutive})", cause)
        judged = self._judged + self._earlier_judged
        invalid = self._invalid + self._earlier_invalid
        if judged >= limits.min_messages and invalid > limits.max_ratio * judged:
            raise self._too_many(f"{invalid} of the last {judged} messages were invalid (limit {limits.max_ratio:.0%})", cause)

    def _judge(self, num_judged: int, num_invalid: int) -> None:
        if self._judged >= self._limits.window:
            self._earlier_judged, self._earlier_invalid = self._judged, self._invalid
            self._judged = self._invalid = 0
        self._judged += num_judged
        self._invalid += num_invalid

    @staticmethod
    def _too_many(what: str, cause: InvalidRecord) -> TooManyDeadLetters:
        return TooManyDeadLetters(
            f"{what}; the last one because: {cause.message}",
            hint="Compare the writer's schemas and namespace with ours; nothing was skipped, so mend it and start again.",
        )


class DeadLetters:
    """Writes dead letters of one consumer."""

    def __init__(self, publisher: Publisher, *, namespace: Namespace, group: str, metrics: BusMetrics) -> None:
        """`group` is the consumer group or the reader's name: it tells the operator who could not read the message."""
        self._publisher = publisher
        self._namespace = namespace
        self._group = group
        self._metrics = metrics

    def send(self, raw: RawMessage, topic: Topic, invalid: InvalidRecord) -> Receipt:
        """Copy `raw` to the topic's dead letters. The receipt says when the original's offset may be committed."""
        value = raw.value()
        headers = dead_letter_headers(raw, invalid, group=self._group)
        if value is not None and len(value) > MAX_RECORD_BYTES:
            headers.append((TRUNCATED_FROM, str(len(value)).encode()))
            value = value[:MAX_RECORD_BYTES]
        logger.warning(
            "Dead letter: %s[%s]@%s is invalid (%s): %s", raw.topic(), raw.partition(), raw.offset(), invalid.reason, invalid.message
        )
        self._metrics.dead_letters.labels(raw.topic(), invalid.reason.value).inc()
        return self._publisher.publish_bytes(self._namespace.dead_letters(topic), value, key=raw.key(), headers=headers)

    def send_and_wait(self, raw: RawMessage, topic: Topic, invalid: InvalidRecord) -> None:
        """As `send`, and wait until the copy is in the log: for a reader whose position moves on when this returns, and is kept.

        Raises DeliveryFailed or DeadlineExceeded.
        """
        self.send(raw, topic, invalid).wait(_ACKNOWLEDGED_S)


def dead_letter_headers(raw: RawMessage, invalid: InvalidRecord, *, group: str) -> list[tuple[str, bytes]]:
    """The original's headers, then what happened, in Connect's and in Spring's words."""
    original = list(raw.headers() or ())
    topic, partition, offset = str(raw.topic()), str(raw.partition()), str(raw.offset())
    error_class = f"{type(invalid).__module__}.{type(invalid).__qualname__}"
    text = {
        _CONNECT + "topic": topic,
        _CONNECT + "partition": partition,
        _CONNECT + "offset": offset,
        _CONNECT + "connector.name": group,
        _CONNECT + "task.id": "0",
        _CONNECT + "stage": "VALUE_CONVERTER",
        _CONNECT + "class.name": "echo_bus.decoding.Decoder",
        _CONNECT + "exception.class.name": error_class,
        _CONNECT + "exception.message": invalid.message,
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
    kept = [(name, value) for name, value in original if not name.startswith(_OURS)]
    return kept + [(name, value.encode(errors="replace")) for name, value in text.items()]


def said_of(headers: Mapping[str, bytes]) -> str:
    """Why a message is a dead letter, as its headers say it."""
    reason, message = headers.get(REASON, b"unknown"), headers.get(_CONNECT + "exception.message", b"")
    return f"{reason.decode(errors='replace')}: {message.decode(errors='replace')}"


def _retries(headers: list[tuple[str, bytes]]) -> int:
    """0 for a first failure, else one more than the header says."""
    for name, value in headers:
        if name == RETRIES and (value or b"").isdigit():
            return int(value) + 1
    return 0
