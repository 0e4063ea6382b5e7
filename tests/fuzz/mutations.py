"""Hostile messages, made from the example records: values that a stranger would try, bytes, keys, headers, places.

Half of them are *told well*: what has to agree for a record to be accepted is made to agree again, so that the lie gets past the codec.
"""

from __future__ import annotations

import copy
import io
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import fastavro

from echo_memory.message import MemoryMessage
from echo_schemas.codec import Codec
from echo_schemas.converters import converter_of
from echo_schemas.headers import headers_of
from echo_schemas.naming import Namespace
from echo_schemas.partitioning import partition_of
from echo_schemas.records import Purpose, Record, group_id_of
from echo_schemas.schemas import newest
from echo_schemas.topics import Topic
from tests.examples import load_examples

NAMESPACE = Namespace("fuzz")
NUM_PARTITIONS = 8
RUN = "demo"
_PREFIX = struct.Struct(">bI")
_HUGE = 900_000

_INTEGERS = (0, 1, -1, -7, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-9)
_TEXTS = (
    "", " ", "\0", "demo", "other-run", "demo/1", "demo/eval-1", "demo/" + "9" * 5_000, "9" * 5_000, "-1", "NaN", "null", "{", "[]", "{}",
    "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, '{"a": 1e999}', "x" * 2_000, "../../etc/passwd", "/dev/null", "file:///etc/passwd",
    "os:system", "\U0001f600" * 50, "\ud7ff\ue000", "a\nb\tc", "%s%n{}{0}", "٣",
)  # fmt: skip
_BYTES = (b"", b"\0", b"abc", b"\xff" * 4, b"\0" * 4_096, struct.pack("<f", math.nan), struct.pack("<f", math.inf), struct.pack("<i", -1))
_HEADERS: tuple[tuple[str, bytes | None], ...] = (
    ("echo-retries", b"9" * 5_000), ("echo-version", b"9" * 5_000), ("echo-version", b"-1"), ("echo-version", b"\xff"),
    ("echo-run", None), ("echo-run", b"other"), ("echo-run", b"\xff\xfe"), ("ce_id", b""), ("ce_id", b"demo/" + b"9" * 5_000 + b"/a/0"),
    ("ce_source", b"\xff" * 900), ("echo-group", b"demo/1"), ("kafka_correlationId", b""), ("kafka_correlationId", b"\xf0\xff"),
    ("kafka_replyTopic", b"fuzz.replies"), ("kafka_replyPartition", b"\0\0\0\x01"), ("kafka_replyPartition", b"\x7f\xff\xff\xff"),
    ("kafka_replyPartition", b"x"), ("echo-deadline-ms", b"9" * 5_000), ("echo-deadline-ms", b"1"), ("echo-truncated-from", b"x"),
    ("kafka_dlt-original-offset", b"-1"), ("", b""), ("\0", b"\0"),
)  # fmt: skip


class Forger:
    """Makes hostile messages for one topic; the same ones for the same random numbers."""

    def __init__(self, topic: Topic, codec: Codec) -> None:
        self.topic = topic
        self._codec = codec
        self._examples = tuple(record for record in load_examples(topic).values() if record.run_id == RUN)
        self._plain = [converter_of(type(record)).to_plain(record) for record in self._examples]

    def honest(self, number: int) -> MemoryMessage:
        """An example as its writer would write it."""
        record = self._examples[number % len(self._examples)]
        return self._message(record, self._codec.encode(record), number)

    def hostile(self, rng: random.Random, offset: int) -> MemoryMessage:
        """A message with one to three things wrong."""
        which = rng.randrange(len(self._examples))
        record, value, key = self._examples[which], b"", None
        if rng.random() < 0.75:
            value, key = self._lie(which, rng)
        value = value or self._codec.encode(record)
        if rng.random() < 0.2:
            value = _broken(value, rng)
        message = self._message(record, None if rng.random() < 0.02 else value, offset, key)
        if rng.random() < 0.4:
            return _elsewhere(message, rng)
        return message

    def _lie(self, which: int, rng: random.Random) -> tuple[bytes, str | None]:
        """The example with other values, encoded without its checks, and the key that goes with it; empty where Avro cannot say it."""
        cls = type(self._examples[which])
        plain = copy.deepcopy(self._plain[which])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            places = list(_places(plain))
            holder, at = rng.choice(places)
            holder[at] = _other(holder[at], rng, places)
        if rng.random() < 0.5:
            _told_well(plain)
        buffer = io.BytesIO()
        schema = newest(cls.SCHEMA)
        buffer.write(_PREFIX.pack(0, self._codec.ids.id_of(schema)))
        try:
            fastavro.schemaless_writer(buffer, schema.parsed, plain)
            record = converter_of(cls).from_plain(plain)
            return buffer.getvalue(), self.topic.key_of(record)
        except Exception:  # a value that no writer could write either: another lie comes soon
            return b"", None

    def _message(self, record: Record, value: bytes | None, offset: int, key: str | None = None) -> MemoryMessage:
        key = key or self.topic.key_of(record)
        partition = partition_of(key, NUM_PARTITIONS) if key is not None and not self.topic.placed else offset % NUM_PARTITIONS
        headers = headers_of(record, source="stranger", time_ms=5)
        return MemoryMessage(
            NAMESPACE.topic(self.topic), partition, offset, None if key is None else key.encode(errors="replace"), value, headers, 5
        )


def _places(node: Any) -> Any:
    """Every (holder, key) in a record as dictionaries and lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for at, value in list(items):
        yield node, at
        yield from _places(value)


def _other(value: Any, rng: random.Random, places: list[Any]) -> Any:
    """Something else of about the same type."""
    if rng.random() < 0.1:
        holder, at = rng.choice(places)
        return copy.deepcopy(holder[at])
    if isinstance(value, bool):
        return not value
    choices: dict[type, Callable[[], Any]] = {
        int: lambda: rng.choice((*_INTEGERS, value + 1, value - 1, rng.getrandbits(40))),
        float: lambda: rng.choice((*_FLOATS, rng.uniform(-1e6, 1e6))),
        str: lambda: rng.choice((*_TEXTS, value + "x", value[:-1])),
        bytes: lambda: rng.choice((*_BYTES, value[:-1], value * 2, rng.randbytes(len(value)))),
        list: lambda: rng.choice(([], value * 2, value[::-1], value[:1] * 300)),
        dict: lambda: {} if rng.random() < 0.3 else {f"k{number}": rng.choice(list(value.values()) or [""]) for number in range(50)},
        type(None): lambda: rng.choice((0, -1, 2**62, "", "x", math.nan, [], b"")),
    }
    return next(choice for kind, choice in choices.items() if isinstance(value, kind))()


def _told_well(plain: dict[str, Any]) -> None:
    """Let agree what a record's own checks compare."""
    plain["run_id"] = RUN
    if isinstance(plain.get("seq"), int) and "group_id" in plain:
        plain["seq"] = max(0, plain["seq"])
        purpose = plain.get("purpose", "eval" if "eval-" in str(plain["group_id"]) else "train")
        plain["group_id"] = group_id_of(RUN, plain["seq"], Purpose(purpose) if purpose in tuple(Purpose) else Purpose.TRAIN)
    spans = plain.get("version_spans")
    if isinstance(spans, list) and spans and all(isinstance(span, dict) and isinstance(span.get("version"), int) for span in spans):
        versions = [max(0, span["version"]) for span in spans]
        for span, version in zip(spans, versions, strict=True):
            span["version"] = version
        plain["min_version"], plain["max_version"] = min(versions), max(versions)
    if isinstance(plain.get("index"), int) and isinstance(plain.get("group_size"), int):
        plain["index"] = max(0, min(plain["index"], plain["group_size"] - 1))


def _broken(value: bytes, rng: random.Random) -> bytes:
    """Other bytes."""
    at = rng.randrange(len(value) + 1)
    return rng.choice(
        (
            lambda: value[:at],
            lambda: value[:at] + rng.randbytes(rng.randrange(1, 9)) + value[at:],
            lambda: value[:at] + rng.randbytes(4) + value[at + 4 :],
            lambda: value + rng.randbytes(rng.randrange(1, 100)),
            lambda: b"\0" + rng.randbytes(4) + value[5:],
            lambda: value[:5] + rng.randbytes(len(value)),
            lambda: rng.randbytes(rng.randrange(0, 50)),
            lambda: value[:at] + b"\xff" * 10 + value[at:],
        )
    )()


def _elsewhere(message: MemoryMessage, rng: random.Random) -> MemoryMessage:
    """Another key, other headers, another place."""
    key, headers, partition = message.key(), message.headers() or [], message.partition() or 0
    what = rng.randrange(4)
    if what == 0:
        key = rng.choice((None, b"", b"\xff\xfe", b"other/1", b"demo", (key or b"") + b"x", b"k" * rng.choice((300, _HUGE))))
    elif what == 1:
        headers = rng.sample(headers, rng.randrange(len(headers) + 1))
    elif what == 2:
        headers = [*headers, *rng.choices(_HEADERS, k=rng.choice((1, 1, 2, 6)))]  # type: ignore[list-item]  # Kafka allows null values
        rng.shuffle(headers)
        if rng.random() < 0.02:
            headers.append(("big", b"x" * _HUGE))
    else:
        partition = rng.randrange(NUM_PARTITIONS)
    return MemoryMessage(
        message.topic() or "", partition, message.offset(), key, message.value(), headers, rng.choice((5, -1, 0, 2**62))
    )  # fmt: skip
