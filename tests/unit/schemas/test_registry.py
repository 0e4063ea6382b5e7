"""The registry client: what it asks, what it keeps, and a named error for every answer. No network: the client is a fake."""

from __future__ import annotations

import builtins
import gc
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import confluent_kafka.schema_registry
import pytest
from confluent_kafka.schema_registry.error import SchemaRegistryError

from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidReason, InvalidRecord, RegistryError, UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import RECORDS
from echo_schemas.registry import HttpRegistry, subjects_of
from echo_schemas.schemas import newest
from echo_schemas.topics import TOPICS, TRAJECTORIES
from tests.examples import load_examples

SUBJECTS = subjects_of(Namespace("echo.demo").topic)
FIRST_ID = 7


class FakeClient:
    """What a registry knows, and every question it was asked. `failure` is raised instead of an answer."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.properties = properties
        self.asked: list[str] = []
        self.levels: dict[str, str] = {}
        self.failure: Exception | None = None
        self.closed = False
        self.refuses: set[str] = set()
        self._ids: dict[str, int] = {}
        self._subjects: dict[str, set[int]] = {}

    def close(self) -> None:
        self.closed = True

    def _ask(self, question: str) -> None:
        self.asked.append(question)
        if self.failure is not None:
            raise self.failure

    def lookup_schema(self, subject: str, schema: Any) -> Any:
        self._ask(f"lookup {subject}")
        schema_id = self._ids.get(schema.schema_str)
        if schema_id not in self._subjects.get(subject, set()):
            raise SchemaRegistryError(404, 40403, "Schema not found")
        return SimpleNamespace(schema_id=schema_id)

    def get_schema(self, schema_id: int) -> Any:
        self._ask(f"get {schema_id}")
        for text, known in self._ids.items():
            if known == schema_id:
                return SimpleNamespace(schema_str=text, schema_type="PROTOBUF" if text.startswith("syntax") else "AVRO")
        raise SchemaRegistryError(404, 40403, "Schema not found")

    def set_compatibility(self, subject: str, level: str) -> None:
        self._ask(f"level {subject}")
        self.levels[subject] = level

    def test_compatibility(self, subject: str, schema: Any) -> bool:
        self._ask(f"compare {subject}")
        if subject not in self._subjects:
            raise SchemaRegistryError(404, 40401, "Subject not found")
        return subject not in self.refuses

    def register_schema(self, subject: str, schema: Any) -> int:
        self._ask(f"register {subject}")
        return self.hold(schema.schema_str, subject)

    def hold(self, text: str, subject: str = "somebody-value") -> int:
        schema_id = self._ids.setdefault(text, FIRST_ID + len(self._ids))
        self._subjects.setdefault(subject, set()).add(schema_id)
        return schema_id


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> HttpRegistry:
    monkeypatch.setattr(confluent_kafka.schema_registry, "SchemaRegistryClient", FakeClient)
    return HttpRegistry("http://registry:8081", SUBJECTS)


def client_of(registry: HttpRegistry) -> FakeClient:
    client = registry._client
    assert isinstance(client, FakeClient)
    return client


def test_every_record_has_a_subject_for_each_topic_that_carries_it() -> None:
    assert set(SUBJECTS) == {newest(record.SCHEMA).full_name for record in RECORDS}
    assert SUBJECTS["echoswarm.Trajectory"] == ("echo.demo.trajectories-value",)
    assert SUBJECTS["echoswarm.Chunk"] == ("echo.demo.steps-echoswarm.Chunk", "echo.demo.weights.chunks-value")
    assert len({subject for subjects in SUBJECTS.values() for subject in subjects}) == sum(len(topic.records) for topic in TOPICS)


def test_ids_are_asked_for_once_and_nothing_is_registered_unasked(registry: HttpRegistry) -> None:
    schema, client = newest("trajectory"), client_of(registry)
    with pytest.raises(RegistryError, match=r"not registered under 'echo\.demo\.trajectories-value'.*schemas register"):
        registry.id_of(schema)
    assert registry.register(schema, "FULL_TRANSITIVE") == registry.id_of(schema) == registry.id_of(schema) == FIRST_ID
    assert client.asked == [
        "lookup echo.demo.trajectories-value",
        "level echo.demo.trajectories-value",
        "register echo.demo.trajectories-value",
        "lookup echo.demo.trajectories-value",
    ]
    assert client.levels == {"echo.demo.trajectories-value": "FULL_TRANSITIVE"}


def test_a_record_on_two_topics_is_registered_under_both(registry: HttpRegistry) -> None:
    registry.register(newest("chunk"), "FULL_TRANSITIVE")
    assert set(client_of(registry).levels) == set(SUBJECTS["echoswarm.Chunk"])


def test_a_codec_over_a_registry_asks_once_in_each_direction(registry: HttpRegistry) -> None:
    registry.register(newest("trajectory"), "FULL_TRANSITIVE")
    client_of(registry).asked.clear()
    codec, record = Codec(registry), load_examples(TRAJECTORIES)["single_turn.json"]
    payload = codec.encode(record)
    assert payload[:5] == b"\x00\x00\x00\x00\x07"
    assert codec.encode(record) == payload
    assert codec.decode(payload) == codec.decode(payload) == record
    assert client_of(registry).asked == ["lookup echo.demo.trajectories-value", "get 7"]


def test_our_own_schema_comes_back_as_our_own_file(registry: HttpRegistry) -> None:
    assert registry.schema_of(client_of(registry).hold(newest("trajectory").text)) is newest("trajectory")


def test_an_id_that_nobody_knows_is_the_messages_fault(registry: HttpRegistry) -> None:
    with pytest.raises(InvalidRecord, match="does not know schema id 99") as caught:
        registry.schema_of(99)
    assert caught.value.reason == InvalidReason.UNKNOWN_SCHEMA


@pytest.mark.parametrize("text", ['syntax = "proto3";', '"string"', '{"type": "enum", "name": "E", "symbols": []', '{"type": "record"}'])
def test_a_schema_that_is_not_an_avro_record_is_somebody_elses(registry: HttpRegistry, text: str) -> None:
    with pytest.raises(InvalidRecord, match="is not an Avro record's") as caught:
        registry.schema_of(client_of(registry).hold(text))
    assert caught.value.reason == InvalidReason.UNEXPECTED_RECORD


@pytest.mark.parametrize("failure", [ConnectionRefusedError("no"), SchemaRegistryError(503, 50301, "starting"), TimeoutError()])
def test_a_registry_that_does_not_answer_is_not_the_messages_fault_and_is_asked_again(registry: HttpRegistry, failure: Exception) -> None:
    client = client_of(registry)
    schema_id = client.hold(newest("trajectory").text)
    client.failure = failure
    with pytest.raises(RegistryError, match="http://registry:8081"):
        registry.schema_of(schema_id)
    with pytest.raises(RegistryError, match="http://registry:8081"):
        registry.id_of(newest("trajectory"))
    client.failure = None
    assert registry.schema_of(schema_id) is newest("trajectory")


def test_a_registry_that_wants_other_credentials_says_so(registry: HttpRegistry) -> None:
    client_of(registry).failure = SchemaRegistryError(401, 40101, "Unauthorized")
    with pytest.raises(RegistryError, match=r"answered 401: Unauthorized\. Check \[registry\] user"):
        registry.schema_of(1)


def test_an_incompatible_schema_is_refused_in_the_registrys_words(registry: HttpRegistry) -> None:
    client_of(registry).failure = SchemaRegistryError(409, 409, "field seq changed its type")
    with pytest.raises(RegistryError, match=r"refused echoswarm\.Trajectory under .*: field seq changed its type"):
        registry.register(newest("trajectory"), "FULL_TRANSITIVE")


def test_what_is_not_registered_is_told_with_whether_it_could_be(registry: HttpRegistry) -> None:
    steps, chunks = SUBJECTS["echoswarm.Chunk"]
    assert registry.missing(newest("chunk")) == {steps: True, chunks: True}
    client_of(registry).hold("other", steps)
    client_of(registry).refuses.add(steps)
    assert registry.missing(newest("chunk")) == {steps: False, chunks: True}
    registry.register(newest("chunk"), "FULL_TRANSITIVE")
    assert registry.missing(newest("chunk")) == {}
    client_of(registry).failure = SchemaRegistryError(503, 50301, "starting")
    with pytest.raises(RegistryError, match="answered 503"):
        registry.missing(newest("chunk"))


def test_a_schema_that_no_topic_carries_has_no_subject(registry: HttpRegistry) -> None:
    lonely = HttpRegistry("http://registry:8081", {})
    with pytest.raises(RegistryError, match=r"No topic carries echoswarm\.Trajectory"):
        lonely.id_of(newest("trajectory"))
    assert client_of(registry).asked == []


def test_the_client_never_waits_for_ever_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confluent_kafka.schema_registry, "SchemaRegistryClient", FakeClient)
    assert client_of(HttpRegistry("http://r", {})).properties["timeout"] > 0
    assert client_of(HttpRegistry("http://r", {}, {"timeout": 99})).properties["timeout"] == 99


def test_its_connections_are_closed_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confluent_kafka.schema_registry, "SchemaRegistryClient", FakeClient)
    registry = HttpRegistry("http://r", {})
    client = client_of(registry)
    assert not client.closed
    del registry
    gc.collect()
    assert client.closed


def test_a_password_in_the_address_is_in_no_message() -> None:
    with pytest.raises(UserError, match="cannot be used") as caught:
        HttpRegistry("ftp://someone:hush@registry", SUBJECTS)
    assert "hush" not in str(caught.value)
    assert "ftp://registry" in str(caught.value)


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_client(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "confluent_kafka.schema_registry":
            raise ModuleNotFoundError(name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_client)
    with pytest.raises(UserError, match=r"\[registry\] url needs the library .confluent_kafka.schema_registry., .*echoswarm\[registry\]"):
        HttpRegistry("http://registry:8081", SUBJECTS)


def test_what_is_sent_is_the_schema_as_written() -> None:
    schema = newest("trajectory")
    assert json.loads(schema.text) == schema.raw
