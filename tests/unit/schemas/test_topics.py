"""Topics, roles, names, headers and partitions: files and code say the same, and no file is an orphan."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest
import yaml
from aiokafka.partitioner import murmur2 as java_murmur2
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.errors import SchemaFileError, UserError
from echo_schemas.headers import GROUP, RUN, VERSION, headers_of, oldest_version, run_of
from echo_schemas.naming import Namespace
from echo_schemas.partitioning import murmur2, partition_of
from echo_schemas.records import Control, Record, Trajectory
from echo_schemas.roles import load_roles
from echo_schemas.schemas import all_schemas
from echo_schemas.topic_files import load_topic_specs, parse_topic_file
from echo_schemas.topics import CONTROL, PROGRESS, REQUESTS, REWARDS, TOPICS, TRAJECTORIES, WEIGHT_CHUNKS, weights_key
from tests.examples import load_examples

PACKAGE = resources.files("echo_schemas")


def topic_files() -> dict[str, Any]:
    return {
        file.name: yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in (PACKAGE / "topics").iterdir()
        if file.name.endswith(".yaml")
    }


def test_every_topic_file_satisfies_the_meta_schema() -> None:
    meta_schema = json.loads((PACKAGE / "topics" / "topic.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(meta_schema)
    for name, content in topic_files().items():
        assert [error.message for error in validator.iter_errors(content)] == [], name


def test_code_and_files_know_the_same_topics() -> None:
    names = {spec.name for spec in load_topic_specs()}
    assert {topic.name for topic in TOPICS} == {name for name in names if not name.endswith(".dlq")}
    assert {name for name in names if name.endswith(".dlq")} == {f"{topic.name}.dlq" for topic in TOPICS}


def test_no_file_is_an_orphan() -> None:
    assert {folder.name for folder in (PACKAGE / "examples").iterdir()} == {topic.name for topic in TOPICS}
    used = {record.SCHEMA for topic in TOPICS for record in topic.records}
    assert {schema.name for schema in all_schemas()} == used
    assert {file.name for file in (PACKAGE / "topics").iterdir()} == {*topic_files(), "topic.schema.json"}


def test_every_role_is_used_and_every_topic_has_known_roles() -> None:
    roles = load_roles()
    used = {role for spec in load_topic_specs() for role in (*spec.producers, *spec.consumers)}
    assert used == set(roles)


def test_retention_is_stated_in_time_and_bytes_or_the_topic_is_compacted() -> None:
    for spec in load_topic_specs():
        if spec.config["cleanup.policy"] == "delete":
            assert {"retention.ms", "retention.bytes"} <= set(spec.config), spec.name


def test_rewards_lie_beside_their_trajectories() -> None:
    specs = {spec.name: spec for spec in load_topic_specs()}
    assert specs["rewards"].partitions == specs["trajectories"].partitions


def test_who_starts_again_may_read_what_it_needs() -> None:
    specs = {spec.name: spec for spec in load_topic_specs()}
    # The feeder reissues what requests no longer shows, a learner reads its own steps and whether another one is alive, a coordinator its
    # own epochs.
    assert "feeder" in specs["requests"].consumers
    assert "learner" in specs["steps"].consumers
    assert "learner" in specs["progress"].consumers
    assert "coordinator" in specs["control"].consumers
    # Who brings letters back reads the originals and writes no letters.
    assert set(specs["requests.dlq"].producers) == set(specs["requests"].consumers) - {"redrive"}


def test_a_small_cluster_gets_as_many_replicas_as_it_has_brokers() -> None:
    spec = load_topic_specs()[0]
    assert spec.fitted_to(3) is spec
    assert (spec.fitted_to(1).replication_factor, spec.fitted_to(1).config["min.insync.replicas"]) == (1, "1")
    assert (spec.fitted_to(2).replication_factor, spec.fitted_to(2).config["min.insync.replicas"]) == (2, "1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partitons": 3}, "unknown keys: partitons"),
        ({"name": "other"}, "name the file after the topic"),
        ({"records": ["Reward"]}, "names the records"),
        ({"cleanup": "delete"}, "says cleanup"),
        ({"retention": {"hours": 1, "bytes_per_partition": 1 << 20}}, "states its retention"),
    ],
)
def test_a_topic_file_that_contradicts_the_code_is_refused(change: dict[str, Any], message: str) -> None:
    content = topic_files()["progress.yaml"] | change
    with pytest.raises(SchemaFileError, match=message):
        parse_topic_file("progress.yaml", content)


def test_a_topic_file_with_a_missing_key_is_refused() -> None:
    content = topic_files()["progress.yaml"]
    del content["owner"]
    with pytest.raises(SchemaFileError, match="lacks owner"):
        parse_topic_file("progress.yaml", content)
    with pytest.raises(SchemaFileError, match="not a mapping"):
        parse_topic_file("progress.yaml", ["progress"])


def test_physical_names() -> None:
    namespace = Namespace("echo.demo")
    assert namespace.topic(TRAJECTORIES) == "echo.demo.trajectories"
    assert namespace.dead_letters(TRAJECTORIES) == "echo.demo.trajectories.dlq"
    assert namespace.group("reward", "exact") == "echo.demo.reward.exact"
    assert namespace.transactional_id("learner") == "echo.demo.learner"
    assert namespace.logical("echo.demo.weights.chunks") is WEIGHT_CHUNKS
    assert namespace.logical("echo.demo.trajectories.dlq") is None
    assert namespace.logical("echo.demolition.trajectories") is None


@pytest.mark.parametrize("name", ["", ".demo", "demo.", "de mo", "démo", "a" * 200, "a/b"])
def test_a_namespace_that_kafka_would_refuse_is_refused_at_once(name: str) -> None:
    with pytest.raises(UserError, match="not a legal topic prefix"):
        Namespace(name)


def test_keys() -> None:
    control = {name: record for name, record in load_examples(CONTROL).items() if isinstance(record, Control)}
    assert CONTROL.key_of(control["worker.json"]) == "demo/worker/w2"
    assert CONTROL.key_of(control["rewards.json"]) == "demo/rewards"
    assert CONTROL.key_of(control["run.json"]) == "demo/run"
    assert REQUESTS.key_of(load_examples(REQUESTS)["asynchronous.json"]) is None
    assert REWARDS.key_of(load_examples(REWARDS)["scored.json"]) == "demo/4711"
    assert WEIGHT_CHUNKS.key_of(load_examples(WEIGHT_CHUNKS)["chunk.json"]) == "demo/v/16/3f3f3f3f3f3f/0"
    assert weights_key("demo", 7) == "demo/v/7"
    assert weights_key("demo", None) == "demo/current"


def test_headers_say_who_when_and_under_which_version_in_plain_text() -> None:
    record = load_examples(TRAJECTORIES)["two_turns_two_versions.json"]
    assert isinstance(record, Trajectory)
    headers = headers_of(record, source="echo.demo.worker.w2", time_ms=1_763_700_000_123)
    text = {name: value.decode() for name, value in headers}
    assert text[RUN] == "demo"
    assert text[GROUP] == "demo/4712"
    assert text[VERSION] == "12"
    assert text["ce_id"] == record.name
    assert text["ce_type"] == "echoswarm.trajectory"
    assert text["ce_time"] == "2025-11-21T04:40:00.123Z"
    assert (run_of(headers), oldest_version(headers)) == ("demo", 12)


def test_every_header_is_text_and_only_trajectories_that_can_be_stale_carry_a_version() -> None:
    for topic in TOPICS:
        for record in load_examples(topic).values():
            names = [name for name, value in headers_of(record, source="s", time_ms=1) if value.decode()]
            assert len(set(names)) == len(names)
            assert (VERSION in names) == (isinstance(record, Trajectory) and not record.is_exempt)
            assert (GROUP in names) == hasattr(record, "group_id")


def test_every_record_has_an_id_of_its_own_and_a_trajectory_the_same_id_each_time() -> None:
    def id_of(record: Record) -> bytes:
        return dict(headers_of(record, source="s", time_ms=1))["ce_id"]

    progress = load_examples(PROGRESS)["progress.json"]
    assert id_of(progress) != id_of(progress)
    sample = load_examples(TRAJECTORIES)["single_turn.json"]
    assert id_of(sample) == id_of(sample) == b"demo/4711/9a3e/3"


def test_headers_that_are_missing_or_nonsense_decide_nothing() -> None:
    assert run_of(None) is None
    assert oldest_version([]) is None
    assert oldest_version([(VERSION, b"-3")]) is None
    assert oldest_version([(VERSION, b"twelve")]) is None
    assert oldest_version([(VERSION, b"\xff")]) is None
    progress = load_examples(PROGRESS)["progress.json"]
    assert oldest_version(headers_of(progress, source="s", time_ms=0)) is None


@given(st.binary(max_size=64))
def test_murmur2_is_the_java_clients(key: bytes) -> None:
    assert murmur2(key) == java_murmur2(key) & 0xFFFFFFFF


def test_a_key_lies_where_librdkafka_and_the_java_client_put_it() -> None:
    # org.apache.kafka.common.utils.UtilsTest.testMurmur2 of Apache Kafka.
    for key, expected in {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}.items():
        assert murmur2(key) == expected & 0xFFFFFFFF
    assert partition_of("foobar", 8) == (-790332482 & 0x7FFFFFFF) % 8


def test_partition_of_stays_inside_the_topic() -> None:
    assert {partition_of(f"demo/{seq}", 8) for seq in range(200)} == set(range(8))
