"""Compatibility between schema versions, and the files that fix ids for ever."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import fastavro
import pytest
from fastavro.read import SchemaResolutionError

from echo_schemas.codec import Codec
from echo_schemas.compatibility import check_all, check_versions
from echo_schemas.converters import converter_of
from echo_schemas.errors import InvalidReason, InvalidRecord, RegistryError, SchemaFileError
from echo_schemas.records import Progress, Record, Trajectory
from echo_schemas.registry import FIRST_LOCK_ID, LockFileRegistry, check_lock, load_lock, make_lock, subject_of
from echo_schemas.schemas import AvroSchema, all_schemas, newest, parse_schema, versions
from echo_schemas.topics import PROGRESS, REWARDS, STEPS, TOPICS, TRAJECTORIES
from tests.examples import load_examples


def evolved(name: str, change: Callable[[dict[str, Any]], object]) -> list[AvroSchema]:
    """[newest version, that version with `change` applied]."""
    old = newest(name)
    raw = copy.deepcopy(old.raw)
    change(raw)
    return [old, parse_schema(raw, name=name, version=old.version + 1)]


def field(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in raw["fields"] if entry["name"] == name)
    return found


def read(schemas: tuple[AvroSchema, AvroSchema], plain: dict[str, Any]) -> dict[str, Any]:
    """`plain` written under the first schema and read under the second, by the library that reads our topics."""
    writer, reader = schemas
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, writer.parsed, plain)
    buffer.seek(0)
    found: Any = fastavro.schemaless_reader(buffer, writer.parsed, reader.parsed)
    assert isinstance(found, dict)
    return found


def stored() -> dict[str, Any]:
    """A trajectory as version 1 wrote it."""
    plain: dict[str, Any] = converter_of(Trajectory).to_plain(load_examples(TRAJECTORIES)["two_turns_two_versions.json"])
    return plain


def test_all_versions_of_all_records_are_compatible() -> None:
    assert check_all() == []


def nested(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = field(raw, name)["type"]
    return found


ALLOWED: dict[str, Callable[[dict[str, Any]], object]] = {
    "an optional field": lambda raw: raw["fields"].append({"name": "x", "type": ["null", "string"], "default": None, "doc": "New."}),
    "a field with a default": lambda raw: raw["fields"].append({"name": "x", "type": "long", "default": 0, "doc": "New."}),
    "a nested field": lambda raw: nested(raw, "sampling")["fields"].append({"name": "x", "type": "int", "default": 0}),
    "a symbol": lambda raw: nested(raw, "finish_reason")["symbols"].append("tool"),
    "a sentence": lambda raw: field(raw, "run_id").update(doc="Another sentence."),
    "another order": lambda raw: raw["fields"].reverse(),
    "a field less, which had a default": lambda raw: raw["fields"].remove(field(raw, "metadata")),
}


@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_evolutions_that_are_allowed_read_one_another(change: Callable[[dict[str, Any]], object]) -> None:
    old, new = evolved("trajectory", change)
    assert check_versions([old, new]) == []
    shared = {entry["name"] for entry in old.raw["fields"]} & {entry["name"] for entry in new.raw["fields"]}
    for forth in ((old, new), (new, old)):
        found, plain = read(forth, stored()), stored()
        for name in shared - {"sampling"}:
            assert found[name] == plain[name], name
        assert found["sampling"]["max_new_tokens"] == plain["sampling"]["max_new_tokens"]


# Each with a record of the new version that the old one, or the other way round, cannot read.
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], dict[str, Any]]] = {
    "a field without a default": (lambda raw: raw["fields"].append({"name": "x", "type": "string", "doc": "New."}), {"x": "x"}),
    "a nested field without a default": (
        lambda raw: nested(raw, "sampling")["fields"].append({"name": "x", "type": "int"}),
        {"sampling": {"max_new_tokens": 1, "x": 1}},
    ),
    "a field less, which had no default": (lambda raw: raw["fields"].remove(field(raw, "worker_id")), {}),
    "another name": (lambda raw: field(raw, "worker_id").update(name="worker"), {"worker": "w"}),
    "an alias for the old name": (lambda raw: field(raw, "worker_id").update(name="worker", aliases=["worker_id"]), {"worker": "w"}),
    "another type": (lambda raw: field(raw, "seq").update(type="string"), {"seq": "1"}),
    "a wider number": (lambda raw: field(raw, "index").update(type="long"), {"index": 2**40}),
    "a value that may be absent": (lambda raw: field(raw, "task").update(type=["null", "string"]), {"task": None}),
    "one more branch": (
        lambda raw: nested(raw, "sampling")["fields"][5].update(type=["null", "long", "string"]),
        {"sampling": {"max_new_tokens": 1, "seed": "s"}},
    ),
    "another item": (lambda raw: nested(raw, "turn_rewards").update(items="string"), {"turn_rewards": ["1"]}),
    "another map": (lambda raw: nested(raw, "metadata").update(values="long"), {"metadata": {"a": 1}}),
    "another nested name": (lambda raw: nested(raw, "sampling").update(name="Draw"), {}),
}


@pytest.mark.parametrize(("change", "values"), REFUSED.values(), ids=REFUSED)
def test_evolutions_that_are_refused_cannot_read_one_another(change: Callable[[dict[str, Any]], object], values: dict[str, Any]) -> None:
    old, new = evolved("trajectory", change)
    assert check_versions([old, new]) != []
    unreadable = 0
    for forth, plain in (((old, new), stored()), ((new, old), stored() | values)):
        try:
            read(forth, plain)
        except (SchemaResolutionError, ValueError):
            unreadable += 1
    assert unreadable > 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: raw.update(namespace="elsewhere"), "became elsewhere.Trajectory"),
        (lambda raw: nested(raw, "finish_reason")["symbols"].remove("length"), "enum FinishReason lost length"),
        (
            lambda raw: raw["fields"].append({"name": "x", "type": ["string", "null"], "default": None, "doc": "New."}),
            "default of x is not of its union's first branch",
        ),
    ],
)
def test_what_avro_lets_pass_and_a_log_must_not(change: Callable[[dict[str, Any]], object], why: str) -> None:
    found = check_versions(evolved("trajectory", change))
    assert len(found) == 1
    assert why in str(found[0])


def test_an_enum_symbol_may_only_be_added_where_there_is_a_default() -> None:
    assert check_versions(evolved("weight_manifest", lambda raw: nested(raw, "kind")["symbols"].append("delta"))) != []


def test_every_pair_is_compared_not_only_neighbours() -> None:
    first, second = evolved("trajectory", lambda raw: raw["fields"].remove(field(raw, "metadata")))
    back = copy.deepcopy(second.raw)
    back["fields"].append({"name": "metadata", "type": "string", "default": "", "doc": "Another meaning."})
    third = parse_schema(back, name="trajectory", version=second.version + 1)
    assert check_versions([first, second]) == check_versions([second, third]) == []
    pairs = {(problem.reader, problem.writer) for problem in check_versions([first, second, third])}
    ends = f"trajectory.v{first.version}", f"trajectory.v{third.version}"
    assert pairs == {ends, ends[::-1]}


def test_a_schema_with_a_field_twice_is_not_avro() -> None:
    with pytest.raises(SchemaFileError, match=r"trajectory\.v\d+ is not valid Avro.*run_id"):
        check_versions(evolved("trajectory", lambda raw: raw["fields"].append(copy.deepcopy(raw["fields"][0]))))


class TwoVersions:
    """Ids of a world where one record has gained a version."""

    def __init__(self, old: AvroSchema, new: AvroSchema) -> None:
        self._ids = {1: old, 2: new}

    def id_of(self, schema: AvroSchema) -> int:
        return next(number for number, known in self._ids.items() if known.fingerprint == schema.fingerprint)

    def schema_of(self, schema_id: int) -> AvroSchema:
        return self._ids[schema_id]


def test_a_newer_producers_record_is_read_without_its_new_field() -> None:
    old, new = evolved("progress", lambda raw: raw["fields"].append({"name": "mood", "type": "string", "default": "", "doc": "New."}))
    record = load_examples(PROGRESS)["progress.json"]
    assert isinstance(record, Progress)
    buffer = io.BytesIO()
    plain = {name: getattr(record, name) for name in record.__slots__} | {"mood": "calm"}
    fastavro.schemaless_writer(buffer, new.parsed, plain)
    assert Codec(TwoVersions(old, new)).decode(b"\x00\x00\x00\x00\x02" + buffer.getvalue()) == record


def test_a_symbol_of_a_newer_producer_is_read_as_the_default() -> None:
    old, new = evolved("trajectory", lambda raw: nested(raw, "finish_reason")["symbols"].append("tool"))
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, new.parsed, stored() | {"finish_reason": "tool"})
    record = Codec(TwoVersions(old, new)).decode(b"\x00\x00\x00\x00\x02" + buffer.getvalue())
    assert isinstance(record, Trajectory)
    assert record.finish_reason == nested(old.raw, "finish_reason")["default"]


def test_a_producer_whose_schema_is_not_compatible_is_named() -> None:
    old, new = evolved("progress", lambda raw: field(raw, "session").update(type="long"))
    buffer = io.BytesIO()
    plain = converter_of(Progress).to_plain(load_examples(PROGRESS)["progress.json"]) | {"session": 5}
    fastavro.schemaless_writer(buffer, new.parsed, plain)
    with pytest.raises(InvalidRecord, match="our newest version cannot read") as caught:
        Codec(TwoVersions(old, new)).decode(b"\x00\x00\x00\x00\x02" + buffer.getvalue())
    assert caught.value.reason == InvalidReason.UNEXPECTED_RECORD


EXAMPLES = [(topic.name, name, record) for topic in TOPICS for name, record in load_examples(topic).items()]


@pytest.mark.parametrize("record", [record for *_, record in EXAMPLES], ids=[f"{topic}/{name}" for topic, name, _ in EXAMPLES])
def test_every_example_is_read_from_every_version_of_its_schema(record: Record) -> None:
    ids, plain = LockFileRegistry(), converter_of(type(record)).to_plain(record)
    for schema in versions(record.SCHEMA):
        written = {entry["name"] for entry in schema.raw["fields"]}
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema.parsed, {name: value for name, value in plain.items() if name in written})
        found = Codec(ids).decode(b"\x00" + ids.id_of(schema).to_bytes(4, "big") + buffer.getvalue())
        assert type(found) is type(record)
        found_plain = converter_of(type(found)).to_plain(found)
        again = io.BytesIO()
        # By the bytes of that version: fields that it lacks, in records within it too, have their defaults.
        fastavro.schemaless_writer(again, schema.parsed, {name: found_plain[name] for name in written})
        assert again.getvalue() == buffer.getvalue()


def test_a_schema_of_somebody_else_is_not_one_of_our_records() -> None:
    other = parse_schema({"type": "record", "name": "Payment", "namespace": "bank", "fields": [{"name": "sum", "type": "long"}]})
    with pytest.raises(InvalidRecord) as caught:
        Codec(TwoVersions(newest("progress"), other)).decode(b"\x00\x00\x00\x00\x02\x08")
    assert caught.value.reason == InvalidReason.UNEXPECTED_RECORD


def test_the_lock_holds_every_schema_and_is_complete() -> None:
    lock = load_lock()
    assert set(lock) == {f"{schema.name}.v{schema.version}" for schema in all_schemas()}
    assert len(set(lock.values())) == len(lock)
    assert min(lock.values()) >= FIRST_LOCK_ID


def test_a_new_schema_gets_the_next_id_and_old_ids_stay() -> None:
    full = make_lock({})
    label = "trajectory.v1"
    without = {name: entry for name, entry in full.items() if name != label}
    again = make_lock(without)
    assert again[label]["id"] == max(entry["id"] for entry in without.values()) + 1
    assert all(again[name] == entry for name, entry in without.items())


def test_a_lock_that_does_not_fit_its_files_is_refused() -> None:
    lock = make_lock({})
    edited = lock | {"trajectory.v1": {"id": lock["trajectory.v1"]["id"], "fingerprint": "0" * 64}}
    with pytest.raises(SchemaFileError, match=r"trajectory\.v1\.avsc was edited after its id was locked"):
        check_lock(edited)
    with pytest.raises(SchemaFileError, match=r"names trajectory\.v0, which has no file"):
        check_lock(lock | {"trajectory.v0": {"id": 1, "fingerprint": ""}})
    with pytest.raises(SchemaFileError, match="one id to two schemas"):
        check_lock(lock | {"trajectory.v1": lock["reward.v1"] | {"fingerprint": lock["trajectory.v1"]["fingerprint"]}})


def test_a_schema_that_is_not_locked_cannot_be_used() -> None:
    with pytest.raises(SchemaFileError, match="no id in registry"):
        LockFileRegistry(ids={})


def test_an_edited_schema_has_no_id() -> None:
    _, edited = evolved("progress", lambda raw: raw["fields"].append({"name": "x", "type": "long", "default": 0, "doc": "X."}))
    with pytest.raises(RegistryError, match=r"progress\.v4"):
        LockFileRegistry().id_of(edited)


def test_docs_may_be_mended_without_a_new_version() -> None:
    old, mended = evolved("progress", lambda raw: field(raw, "version").update(doc="Mended."))
    assert LockFileRegistry().id_of(mended) == LockFileRegistry().id_of(old)


def test_unknown_records_and_broken_schemas_are_named() -> None:
    with pytest.raises(SchemaFileError, match="nonsense"):
        versions("nonsense")
    with pytest.raises(SchemaFileError, match="not valid Avro"):
        parse_schema({"type": "record", "name": "X", "fields": [{"name": "a", "type": "no-such-type"}]})


def test_subjects_follow_the_topic_where_it_carries_one_record_and_name_the_record_where_it_carries_several() -> None:
    assert subject_of("echo.demo.rewards", REWARDS, "echoswarm.Reward") == "echo.demo.rewards-value"
    assert subject_of("echo.demo.steps", STEPS, "echoswarm.StepReport") == "echo.demo.steps-echoswarm.StepReport"
