"""The generated writer and reader agree with fastavro on every record, and leave to it what they do not know."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.codec import lock_file_codec
from echo_schemas.converters import converter_of
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import RECORDS, Progress, Record, Reward, Trajectory
from echo_schemas.schemas import newest
from echo_schemas.straight import reader_of, writer_of
from echo_schemas.topics import PROGRESS, REWARDS, TOPICS, TRAJECTORIES
from tests.examples import load_examples

ALL_EXAMPLES = [record for topic in TOPICS for record in load_examples(topic).values()]
WRITERS = {record: writer_of(record, newest(record.SCHEMA)) for record in RECORDS}
READERS = {record: reader_of(record, newest(record.SCHEMA)) for record in RECORDS}


def by_fastavro(record: Record) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, newest(record.SCHEMA).parsed, converter_of(type(record)).to_plain(record))
    return buffer.getvalue()


@pytest.mark.parametrize("record", ALL_EXAMPLES, ids=lambda record: type(record).__name__)
def test_the_bytes_are_fastavros(record: Record) -> None:
    assert WRITERS[type(record)](record, b"prefix") == b"prefix" + by_fastavro(record)
    assert READERS[type(record)](b"prefix" + by_fastavro(record), 6) == record


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.text(), st.dictionaries(st.text(), st.floats(allow_nan=False)))
def test_any_values_are_written_as_fastavro_writes_them(number: int, value: float, text: str, parts: dict[str, float]) -> None:
    example: Any = load_examples(REWARDS)["scored.json"]
    record = dataclasses.replace(example, seq=number, time_ms=number, seconds=value, error=text, components=parts)
    payload = by_fastavro(record)
    assert WRITERS[Reward](record, b"") == payload
    assert repr(READERS[Reward](payload, 0)) == repr(record)


@given(st.data())
def test_altered_bytes_are_read_as_fastavro_reads_them_or_left_to_it(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(ALL_EXAMPLES))
    payload = bytearray(by_fastavro(record))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = READERS[type(record)](bytes(payload), 0)
    except Exception:  # the codec asks fastavro
        return
    buffer = io.BytesIO(bytes(payload))
    plain: Any = fastavro.schemaless_reader(buffer, newest(record.SCHEMA).parsed, None)
    assert buffer.tell() == len(payload)
    assert repr(converter_of(type(record)).from_plain(plain)) == repr(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 1 << 63},
        {"seq": "5"},
        {"seconds": None},
        {"components": None},
        {"name": b"exact"},
        {"name": "\ud800"},
        {"outcome": "unheard of"},
        {"of": None},
    ],
)
def test_a_value_of_another_type_is_refused(changes: dict[str, Any]) -> None:
    example: Any = load_examples(REWARDS)["scored.json"]
    record = dataclasses.replace(example, **changes)
    with pytest.raises(Exception):  # noqa: B017  any error: the codec asks fastavro
        WRITERS[Reward](record, b"")
    with pytest.raises(InvalidRecord):
        lock_file_codec().encode(record)


def test_arrays_in_several_blocks_are_left_to_fastavro() -> None:
    """Other writers may write an array in blocks with their sizes; the record is the same."""
    record: Any = load_examples(TRAJECTORIES)["single_turn.json"]
    codec = lock_file_codec()
    payload = codec.encode(record)
    (span,) = record.generated
    one_block = bytes([2, 2 * span.start, 2 * span.end, 0])
    assert payload.count(one_block) == 1
    with_size = bytes([1, 4, 2 * span.start, 2 * span.end, 0])
    other = payload.replace(one_block, with_size)
    with pytest.raises(ValueError, match=r"^$"):
        READERS[Trajectory](other, 5)
    assert codec.decode(other) == record


def test_a_number_without_end_is_refused_at_once() -> None:
    record: Any = load_examples(PROGRESS)["progress.json"]
    payload = lock_file_codec().encode(record)[:5] + b"\xff" * 800_000
    with pytest.raises(ValueError):
        READERS[Progress](payload, 5)
    with pytest.raises(InvalidRecord) as caught:
        lock_file_codec().decode(payload)
    assert caught.value.reason in {InvalidReason.MALFORMED, InvalidReason.TRUNCATED}


def _read_one_after_another(*payloads: bytes) -> list[Any]:
    read = reader_of(Trajectory, newest(Trajectory.SCHEMA))
    found: list[Any] = []
    for payload in payloads:
        try:
            found.append(read(payload, 0))
        except Exception as exc:  # any error: the codec asks fastavro
            found.append(type(exc))
    return found


def test_what_a_record_has_in_common_with_the_one_before_is_read_once_and_what_it_has_not_is_its_own() -> None:
    example: Any = load_examples(TRAJECTORIES)["single_turn.json"]
    others = [
        example,
        dataclasses.replace(example, index=example.index + 1, completion="another text"),
        dataclasses.replace(example, attempt="another"),
        dataclasses.replace(example, prompt=example.prompt + "!", max_version=example.max_version + 1),
        dataclasses.replace(example, sampling=dataclasses.replace(example.sampling, temperature=0.5, stop=("end",))),
        dataclasses.replace(example, run_id=example.run_id + "x", worker_id=example.worker_id[:-1]),
        example,
    ]
    found = _read_one_after_another(*map(by_fastavro, others))
    assert found == others
    assert found[1].prompt is found[0].prompt
    assert found[1].sampling is found[0].sampling


def test_what_was_cut_off_in_the_middle_of_a_text_is_not_taken_for_the_next_record() -> None:
    example: Any = load_examples(TRAJECTORIES)["single_turn.json"]
    whole = by_fastavro(example)
    cut = [whole[:length] for length in range(len(whole))]
    # A fresh reader for each, so that what it remembers is of the cut record only.
    for part in cut:
        refused, found = _read_one_after_another(part, whole)
        assert isinstance(refused, type)
        assert found == example


@given(st.data())
def test_altered_bytes_between_others_are_read_as_fastavro_reads_them(data: st.DataObject) -> None:
    examples = [record for record in ALL_EXAMPLES if isinstance(record, Trajectory)]
    payloads = []
    for record in data.draw(st.lists(st.sampled_from(examples), min_size=2, max_size=5)):
        payload = bytearray(by_fastavro(record))
        for _ in range(data.draw(st.integers(0, 3))):
            payload[data.draw(st.integers(0, min(80, len(payload) - 1)))] = data.draw(st.integers(0, 255))
        payloads.append(bytes(payload))
    for altered, found in zip(payloads, _read_one_after_another(*payloads), strict=True):
        if isinstance(found, Trajectory):
            buffer = io.BytesIO(altered)
            plain: Any = fastavro.schemaless_reader(buffer, newest(Trajectory.SCHEMA).parsed, None)
            assert repr(converter_of(Trajectory).from_plain(plain)) == repr(found)


def test_repeated_fields_are_neighbours_in_their_order() -> None:
    for record in RECORDS:
        names = [field["name"] for field in newest(record.SCHEMA).parsed["fields"]]
        places = [names.index(name) for run in record.REPEATED for name in run]
        assert places == sorted(set(places)), f"{record.__name__}.REPEATED"
