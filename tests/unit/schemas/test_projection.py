"""Fields read out of a record's bytes are those that a whole decode finds, whatever version wrote them; bytes that end are noticed."""

from __future__ import annotations

import enum
import io
import struct
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.codec import lock_file_codec
from echo_schemas.converters import converter_of
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.projection import Projection, compile_extract
from echo_schemas.records import Drop, Record, Reward, RolloutRequest, Trajectory, WeightManifest, WorkerStatus
from echo_schemas.registry import LockFileRegistry
from echo_schemas.schemas import newest, parse_schema, versions
from echo_schemas.topics import DROPS, REQUESTS, REWARDS, TRAJECTORIES, WEIGHTS, WORKERS
from tests.examples import load_examples

IDS = LockFileRegistry()
TOPICS_WITH_EXAMPLES = (TRAJECTORIES, REWARDS, DROPS, REQUESTS, WEIGHTS, WORKERS)
EXAMPLES = {f"{topic.name}/{name}": record for topic in TOPICS_WITH_EXAMPLES for name, record in load_examples(topic).items()}
A_TRAJECTORY = next(record for record in EXAMPLES.values() if isinstance(record, Trajectory) and record.weights_sha256)


def plain_fields(record: type[Record]) -> list[str]:
    """Those that a projection reads."""
    kinds = {field["name"]: field["type"] for field in newest(record.SCHEMA).parsed["fields"]}
    return [
        name
        for name, kind in kinds.items()
        if kind in ("string", "bytes", "int", "long") or (isinstance(kind, dict) and kind["type"] == "enum")
    ]


def as_read(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("record", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_every_plain_field_of_every_example(record: Record) -> None:
    fields = plain_fields(type(record))
    payload = lock_file_codec().encode(record)
    found = Projection(type(record), fields, IDS).read(payload)
    assert found == tuple(as_read(getattr(record, name)) for name in fields)
    last = Projection(type(record), fields[-1:], IDS).read(payload)
    assert last == found[-1:]


REWARDS_OF_EXAMPLES = {name: record for name, record in EXAMPLES.items() if isinstance(record, Reward)}


@pytest.mark.parametrize("record", REWARDS_OF_EXAMPLES.values(), ids=REWARDS_OF_EXAMPLES.keys())
def test_fields_of_an_inner_record_and_those_that_may_be_null(record: Reward) -> None:
    read = Projection(Reward, ("of.offset", "value", "error", "of.partition", "name"), IDS).read
    payload = lock_file_codec().encode(record)
    assert read(payload) == (record.of.offset, record.value, as_read(record.error), record.of.partition, record.name.encode())
    for end in range(len(payload) // 2):
        with pytest.raises(InvalidRecord):
            read(payload[:end])


def test_the_kinds_of_records_cover_every_avro_type_that_is_stepped_over() -> None:
    assert {type(record) for record in EXAMPLES.values()} >= {Trajectory, Reward, Drop, RolloutRequest, WeightManifest, WorkerStatus}


def test_an_older_writer_leaves_the_default() -> None:
    old, new = versions("trajectory")[0], newest("trajectory")
    record = A_TRAJECTORY
    plain = {name: value for name, value in converter_of(Trajectory).to_plain(record).items() if name != "source"}
    buffer = io.BytesIO()
    buffer.write(struct.pack(">bI", 0, IDS.id_of(old)))
    fastavro.schemaless_writer(buffer, old.parsed, plain)
    assert old is not new
    assert Projection(Trajectory, ["seq", "source"], IDS).read(buffer.getvalue()) == (record.seq, b"live")


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.text(),
    st.binary(),
    st.lists(st.integers(-(2**31), 2**31 - 1)),
    st.none() | st.floats(allow_nan=False),
)
def test_any_value(number: int, text: str, data: bytes, numbers: list[int], maybe: float | None) -> None:
    fields = [
        {"name": "numbers", "type": {"type": "array", "items": "int"}},
        {"name": "map", "type": {"type": "map", "values": {"type": "array", "items": "bytes"}}},
        {"name": "maybe", "type": ["null", "double"]},
        {"name": "number", "type": "long"},
        {"name": "data", "type": "bytes"},
        {"name": "text", "type": "string"},
    ]
    schema = parse_schema({"type": "record", "name": "echoswarm.Any", "fields": fields})
    buffer = io.BytesIO()
    value = {"numbers": numbers, "map": {text: [data, data]}, "maybe": maybe, "number": number, "data": data, "text": text}
    fastavro.schemaless_writer(buffer, schema.parsed, value)
    assert compile_extract(schema, ["text", "number", "data"], schema)(buffer.getvalue(), 0) == (text.encode(), number, data)


def test_blocks_that_name_their_size_are_stepped_over() -> None:
    """Other writers than fastavro write a block's size after a negative count."""
    fields = [{"name": "numbers", "type": {"type": "array", "items": "long"}}, {"name": "after", "type": "int"}]
    schema = parse_schema({"type": "record", "name": "echoswarm.Blocks", "fields": fields})
    two_items_in_three_bytes = bytes([3, 6, 0x81, 1, 2, 0])
    assert compile_extract(schema, ["after"], schema)(two_items_in_three_bytes + bytes([14]), 0) == (7,)


def test_bytes_that_end_anywhere_are_noticed() -> None:
    record = A_TRAJECTORY
    payload = lock_file_codec().encode(record)
    projection = Projection(Trajectory, ["seq", "weights_sha256"], IDS)
    whole = projection.read(payload)
    end = payload.index(record.weights_sha256.encode()) + len(record.weights_sha256)
    assert whole[1] == record.weights_sha256.encode()
    for length in range(5, end):
        with pytest.raises(InvalidRecord) as caught:
            projection.read(payload[:length])
        assert caught.value.reason is InvalidReason.TRUNCATED
    assert projection.read(payload[:end]) == whole, "what follows is never looked at"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, InvalidReason.NULL_VALUE),
        (b"", InvalidReason.TRUNCATED),
        (b"\x01\x00\x00\x00\x00\x00", InvalidReason.BAD_MAGIC),
        (b"\x00\x00\x00\x00\x01\x00", InvalidReason.UNKNOWN_SCHEMA),
        (struct.pack(">bI", 0, IDS.id_of(newest("reward"))) + b"\x00" * 40, InvalidReason.UNEXPECTED_RECORD),
        (struct.pack(">bI", 0, IDS.id_of(newest("trajectory"))) + b"\xff" * 40, InvalidReason.TRUNCATED),
    ],
)
def test_what_is_no_such_record(payload: bytes | None, reason: InvalidReason) -> None:
    with pytest.raises(InvalidRecord) as caught:
        Projection(Trajectory, ["seq"], IDS).read(payload)
    assert caught.value.reason is reason


def test_fields_that_are_no_plain_values_are_refused() -> None:
    schema = newest("trajectory")
    with pytest.raises(TypeError, match="not one that a projection reads"):
        compile_extract(schema, ["generated"], schema)
