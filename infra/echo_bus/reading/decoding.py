"""Turns the client's raw messages into `Message`s. Used by the consumer loop, the log reader and, through it, the views.

Each message becomes one of three: a `Message`, None (ignored: it belongs to another run, or to none), or InvalidRecord with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from echo_bus.client.cluster import RawMessage
from echo_bus.message import LazyHeaders, Message, raw_headers
from echo_schemas.errors import InvalidReason, InvalidRecord, RegistryError
from echo_schemas.headers import FILLER_RUN, run_of
from echo_schemas.partitioning import partition_of
from echo_schemas.records import Record
from echo_schemas.topics import Topic

if TYPE_CHECKING:
    from echo_bus.signatures import Verifier
    from echo_bus.wire import Wire


class IgnoredReason(StrEnum):
    """Why a valid message is ignored. A metric label."""

    OTHER_RUN = "other_run"


class Decoder:
    """Decodes and checks the messages of some topics. Not thread-safe, but another thread may set partition counts."""

    def __init__(self, wire: Wire, topics: Sequence[Topic]) -> None:
        self._decode = wire.codec.decode
        self._routes = {wire.namespace.topic(topic): _Route(topic, wire.verifier if topic.author is not None else None) for topic in topics}
        self._run_id = run_id = wire.run_id
        # A key that begins with the run's name is *probably* of this run, so its headers are not parsed; the body decides.
        self._run_prefix = None if run_id is None else f"{run_id}/".encode()

    @property
    def topics_with_placement(self) -> tuple[str, ...]:
        """Physical names of the topics whose keys decide the partition; they need `set_num_partitions`."""
        return tuple(physical for physical, route in self._routes.items() if route.checks_key)

    def set_num_partitions(self, counts: Mapping[str, int]) -> None:
        """Set the topics' numbers of partitions, by physical name. Without the number, key and partition are not compared."""
        for physical, count in counts.items():
            route = self._routes.get(physical)
            if route is not None:
                route.num_partitions = count
                route.forget()

    def topic_of(self, raw: RawMessage) -> Topic:
        """The logical topic of a message."""
        return self._routes[raw.topic() or ""].topic

    def decode(self, raw: RawMessage) -> Message | None:
        """The message, or None if it belongs to another run.

        Raises InvalidRecord if it can never be accepted, also after an unexpected exception; RegistryError if the registry did not answer.
        """
        try:
            return self._judge(raw)
        except (InvalidRecord, RegistryError):
            raise
        except Exception as exc:  # one message must never stop its reader
            raise InvalidRecord(InvalidReason.MALFORMED, f"Looking at the message raised {type(exc).__name__}: {exc}") from exc

    def _judge(self, raw: RawMessage) -> Message | None:
        key = raw.key()
        route = self._routes[raw.topic()]  # type: ignore[index]  # a message without error has a topic, a partition and an offset
        run_id = self._run_id
        if run_id is not None and not (key is not None and key.startswith(self._run_prefix)):  # type: ignore[arg-type]  # set with run_id
            named = run_of(raw_headers(raw))
            if named is not None and named != run_id:
                return None
        value = raw.value()
        record: Record | None = None
        if value is not None:
            # Check the signature first: bytes of an unknown writer are not decoded.
            signer = None if route.verifier is None else route.verifier.signer_of(raw)
            record = self._decode(value)
            if type(record) not in route.records:
                raise InvalidRecord(
                    InvalidReason.UNEXPECTED_RECORD, f"A {type(record).__name__} does not belong on the topic {route.topic.name!r}."
                )
            if run_id is not None and record.run_id != run_id:
                return None
            if signer is not None:
                signer.require_author(route.topic, route.topic.author(record))  # type: ignore[misc]  # set where there is a verifier
        elif not route.topic.compacted:
            if run_of(raw_headers(raw)) == FILLER_RUN:
                return None
            raise InvalidRecord(
                InvalidReason.NULL_VALUE, f"The value is null; {route.topic.name!r} is not compacted and has no tombstones."
            )
        partition: int = raw.partition()  # type: ignore[assignment]  # see above
        # The members of a group follow one another, so the same key was just checked.
        if key is not None and key == route.checked_key and partition == route.checked_partition:
            text: str | None = route.checked_text
            if record is not None and route.checks_key and text != route.key_of(record):  # type: ignore[misc]  # set with checks_key
                route.check(text, partition, record)
        else:
            text = None if key is None else _text_of(key)
            if route.wants_key:
                route.check(text, partition, record)
            route.checked_key, route.checked_partition, route.checked_text = key, partition, text
        # Positional arguments: they are faster, and this runs once per message.
        return Message(
            route.topic,
            partition,
            raw.offset(),  # type: ignore[arg-type]  # see above
            text,
            record,
            LazyHeaders(raw),
            raw.timestamp()[1],
            0 if value is None else len(value),
        )


class _Route:
    """One topic: its checks, and the last key that was checked."""

    __slots__ = (
        "checked_key",
        "checked_partition",
        "checked_text",
        "checks_key",
        "key_of",
        "num_partitions",
        "records",
        "topic",
        "verifier",
        "wants_key",
    )

    def __init__(self, topic: Topic, verifier: Verifier | None) -> None:
        self.topic = topic
        self.verifier = verifier
        self.records = frozenset(topic.records)
        self.key_of = topic.key
        self.checks_key = topic.key is not None and not topic.placed
        self.wants_key = self.checks_key or topic.compacted
        self.num_partitions: int | None = None
        self.forget()

    def forget(self) -> None:
        """Check the next key again."""
        self.checked_key: bytes | None = None
        self.checked_partition = -1
        self.checked_text: str | None = None

    def check(self, key: str | None, partition: int, record: Record | None) -> None:
        """Raise InvalidRecord if the key does not match the record, or the partition the key."""
        if key is None:
            raise InvalidRecord(InvalidReason.KEY_MISMATCH, f"The message has no key; every record of {self.topic.name!r} has one.")
        if not self.checks_key or self.key_of is None:
            return
        if record is not None and key != self.key_of(record):
            raise InvalidRecord(InvalidReason.KEY_MISMATCH, f"The key is {key!r}; the record's own is {self.key_of(record)!r}.")
        if self.num_partitions is not None:
            wanted = partition_of(key, self.num_partitions)
            if wanted != partition:
                raise InvalidRecord(
                    InvalidReason.PARTITION_MISMATCH,
                    f"The key {key!r} belongs to partition {wanted} of {self.num_partitions}, not {partition}.",
                    hint="Write with the murmur2 partitioner, and never add partitions to a keyed topic that is in use.",
                )


def _text_of(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRecord(InvalidReason.KEY_MISMATCH, "The key is not UTF-8 text.") from exc
