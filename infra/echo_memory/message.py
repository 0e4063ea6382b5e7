"""A message with the methods of confluent_kafka.Message."""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """A message for `poll` and for delivery callbacks, with confluent-kafka's methods."""

    _topic: str
    _partition: int
    _offset: int | None
    _key: bytes | None = None
    _value: bytes | None = None
    _headers: list[tuple[str, bytes]] | None = None
    _timestamp_ms: int = 0
    _error: KafkaError | None = None

    def topic(self) -> str | None:
        return self._topic

    def partition(self) -> int | None:
        return self._partition

    def offset(self) -> int | None:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes]] | None:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_CREATE_TIME, self._timestamp_ms

    def error(self) -> KafkaError | None:
        return self._error

    def __len__(self) -> int:
        return 0 if self._value is None else len(self._value)
