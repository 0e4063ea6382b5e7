"""Files below `schemas/` that contradict themselves or the code are refused, and the sentence says which and why."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
import yaml

from echo_schemas.converters import Converter
from echo_schemas.errors import SchemaFileError
from echo_schemas.roles import load_roles, parse_roles
from echo_schemas.schemas import newest, parse_files
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REWARDS, TOPICS, TRAJECTORIES
from tests.examples import load_examples, parse_example, to_json

SCHEMA = newest("progress").text


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"progress.avsc": SCHEMA}, r"avro/progress\.avsc is not named"),
        ({"progress.v0.avsc": SCHEMA}, "is not named"),
        ({"Progress.v1.avsc": SCHEMA}, "is not named"),
        ({"progress.v2.avsc": SCHEMA}, r"versions of progress are \[2\]"),
        ({"progress.v1.avsc": SCHEMA, "progress.v3.avsc": SCHEMA}, r"\[1, 3\]"),
        ({"progress.v1.avsc": SCHEMA[:-1]}, r"avro/progress\.v1\.avsc is not JSON"),
        ({"progress.v1.avsc": "{}"}, "not valid Avro"),
    ],
)
def test_schema_files_that_cannot_be_are_refused(files: dict[str, str], why: str) -> None:
    with pytest.raises(SchemaFileError, match=why):
        parse_files(files)


def test_versions_are_ordered_as_numbers() -> None:
    files = {f"progress.v{number}.avsc": SCHEMA for number in range(11, 0, -1)}
    assert [schema.version for schema in parse_files(files)] == list(range(1, 12))


def test_every_example_file_is_what_its_record_says() -> None:
    for topic in TOPICS:
        folder = resources.files("echo_schemas") / "examples" / topic.name
        for name, record in load_examples(topic).items():
            record.validate()
            assert json.loads((folder / name).read_text(encoding="utf-8")) == to_json(record), f"{topic.name}/{name}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.update(record="Reward"), "is a Reward, which is not published on trajectories"),
        (lambda content: content.update(record="Payment"), "is a Payment"),
        (lambda content: content.pop("record"), "is a None"),
        (lambda content: content["fields"].pop("seq"), "is not a whole Trajectory: KeyError"),
        (lambda content: content["fields"].update(finish_reason="bored"), "is not a whole Trajectory: KeyError"),
        (lambda content: content["fields"].update(generated=None), "is not a whole Trajectory: TypeError"),
        (lambda content: content["fields"].update(seqence=1), "has fields that a Trajectory has not"),
        (lambda content: content["fields"]["sampling"].update(top=1), "has fields that a Trajectory has not"),
    ],
)
def test_an_example_that_is_not_a_record_of_its_topic_is_refused(change: Callable[[dict[str, Any]], object], why: str) -> None:
    content = to_json(load_examples(TRAJECTORIES)["single_turn.json"])
    change(content)
    with pytest.raises(SchemaFileError, match=why):
        parse_example(TRAJECTORIES, "changed.json", content)


def test_an_example_of_another_topic_is_refused() -> None:
    content = to_json(load_examples(TRAJECTORIES)["single_turn.json"])
    with pytest.raises(SchemaFileError, match="not published on rewards"):
        parse_example(REWARDS, "single_turn.json", content)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda roles: roles["worker"].update(grups=["worker"]), "worker has unknown keys: grups"),
        (lambda roles: roles["worker"].pop("groups"), "worker lacks groups"),
        (lambda roles: roles["feeder"].update(watches_groups=["workers"]), "feeder watches workers"),
        (lambda roles: roles.pop("coordinator"), "names coordinator, which roles.yaml does not know"),
    ],
)
def test_roles_that_do_not_fit_the_topics_are_refused(change: Callable[[dict[str, Any]], object], why: str) -> None:
    content = yaml.safe_load((resources.files("echo_schemas") / "roles.yaml").read_text(encoding="utf-8"))
    assert parse_roles(copy.deepcopy(content), load_topic_specs()) == load_roles()
    change(content)
    with pytest.raises(SchemaFileError, match=why):
        parse_roles(content, load_topic_specs())


def test_a_record_field_without_an_avro_form_is_refused_when_the_class_is_first_used() -> None:
    unclear = dataclasses.make_dataclass("Unclear", [("field", int | str)])
    with pytest.raises(TypeError, match=r"only `X \| None` is known"):
        Converter(unclear)
    strange = dataclasses.make_dataclass("Strange", [("field", complex)])
    with pytest.raises(TypeError, match="has no Avro form"):
        Converter(strange)
