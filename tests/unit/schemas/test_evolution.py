"""Compatibility between schema versions, and the files that fix ids for ever."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import fastavro
import pytest

from echo_schemas.codec import Codec
from echo_schemas.compatibility import check_all, check_versions
from echo_schemas.errors import InvalidReason, InvalidRecord, RegistryError, SchemaFileError
from echo_schemas.examples import load_examples
from echo_schemas.records import Progress
from echo_schemas.registry import FIRST_LOCK_ID, LockFileRegistry, load_lock, make_lock, subject_of
from echo_schemas.schemas import AvroSchema, all_schemas, newest, parse_schema, versions
from echo_schemas.topics import PROGRESS, STEPS


def evolved(name: str, change: Callable[[dict[str, Any]], None]) -> list[AvroSchema]:
    """[newest version, that version with `change` applied]."""
    old = newest(name)
    raw = copy.deepcopy(old.raw)
    change(raw)
    return [old, parse_schema(raw, name=name, version=old.version + 1)]


def field(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in raw["fields"] if entry["name"] == name)
    return found


def test_all_versions_of_all_records_are_compatible() -> None:
    assert check_all() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["fields"].append({"name": "extra", "type": ["null", "string"], "default": None, "doc": "New."}),
        lambda raw: raw["fields"].append({"name": "extra", "type": "long", "default": 0, "doc": "New."}),
        lambda raw: field(raw, "finish_reason")["type"]["symbols"].append("tool"),
        lambda raw: field(raw, "run_id").update(doc="Another sentence."),
    ],
)
def test_evolutions_that_are_allowed(change: Callable[[dict[str, Any]], None]) -> None:
    assert check_versions(evolved("trajectory", change)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["fields"].append({"name": "extra", "type": "string", "doc": "New, and no default."}),
        lambda raw: raw["fields"].remove(field(raw, "worker_id")),
        lambda raw: field(raw, "worker_id").update(name="worker"),
        lambda raw: field(raw, "seq").update(type="string"),
        lambda raw: field(raw, "index").update(type="long"),
        lambda raw: raw.update(name="Rollout"),
    ],
)
def test_evolutions_that_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    assert check_versions(evolved("trajectory", change)) != []


def test_an_enum_symbol_may_only_be_added_where_there_is_a_default() -> None:
    assert check_versions(evolved("weight_manifest", lambda raw: field(raw, "kind")["type"]["symbols"].append("delta"))) != []


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


def test_a_schema_that_is_not_locked_cannot_be_used() -> None:
    with pytest.raises(SchemaFileError, match="no id in registry"):
        LockFileRegistry(ids={})


def test_an_edited_schema_has_no_id() -> None:
    _, edited = evolved("progress", lambda raw: raw["fields"].append({"name": "x", "type": "long", "default": 0, "doc": "X."}))
    with pytest.raises(RegistryError, match=r"progress\.v2"):
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
    assert subject_of("echo.demo.progress", PROGRESS, "echoswarm.Progress") == "echo.demo.progress-value"
    assert subject_of("echo.demo.steps", STEPS, "echoswarm.StepReport") == "echo.demo.steps-echoswarm.StepReport"
