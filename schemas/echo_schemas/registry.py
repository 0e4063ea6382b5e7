"""Where schema ids come from: a lock file in the package, or a Confluent-compatible registry. One interface for both."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Protocol

from echo_schemas.errors import InvalidReason, InvalidRecord, RegistryError, SchemaFileError
from echo_schemas.schemas import AvroSchema, all_schemas, newest, parse_schema
from echo_schemas.topics import TOPICS, Topic

# Far above any id that a registry hands out, so that data written without a registry never collides with data written with one.
FIRST_LOCK_ID = 1_000_000_000


class SchemaIds(Protocol):
    """Schema ↔ id, as the 4 bytes behind the magic byte name it."""

    def id_of(self, schema: AvroSchema) -> int:
        """The id under which `schema` is written. Raises RegistryError if it is not registered."""

    def schema_of(self, schema_id: int) -> AvroSchema:
        """The schema of an id. Raises InvalidRecord (UNKNOWN_SCHEMA) if nobody knows it, RegistryError if nobody answers."""


class LockFileRegistry:
    """Ids from `registry.lock.json`: fixed for ever by the repository, no service needed."""

    def __init__(self, ids: Mapping[str, int] | None = None, schemas: Iterable[AvroSchema] | None = None) -> None:
        self._by_id: dict[int, AvroSchema] = {}
        self._by_fingerprint: dict[str, int] = {}
        locked = load_lock() if ids is None else ids
        for schema in all_schemas() if schemas is None else schemas:
            label = lock_label(schema)
            if label not in locked:
                raise SchemaFileError(f"{label} has no id in registry.lock.json.", hint="Run `echoswarm schemas check --update-lock`.")
            self._by_id[locked[label]] = schema
            self._by_fingerprint[schema.fingerprint] = locked[label]

    def id_of(self, schema: AvroSchema) -> int:
        try:
            return self._by_fingerprint[schema.fingerprint]
        except KeyError:
            raise RegistryError(
                f"Schema {lock_label(schema)} is not in registry.lock.json, or was edited after it was locked.",
                hint="Never edit a schema file: add the next version.",
            ) from None

    def schema_of(self, schema_id: int) -> AvroSchema:
        try:
            return self._by_id[schema_id]
        except KeyError:
            raise InvalidRecord(
                InvalidReason.UNKNOWN_SCHEMA,
                f"Schema id {schema_id} is not in registry.lock.json.",
                hint="The writer uses a schema registry, or a newer release: set [registry] url, or upgrade.",
            ) from None


class HttpRegistry:
    """A Confluent-compatible registry over HTTP. Never registers by itself: `echoswarm schemas register` does.

    Thread-safe; every answer is cached for the life of the process, since ids are for ever.
    """

    def __init__(self, url: str, subjects: Mapping[str, str], properties: Mapping[str, Any] | None = None) -> None:
        """`subjects`: schema full name → subject under which it is registered (see `subjects_of`)."""
        from confluent_kafka.schema_registry import SchemaRegistryClient

        self._url = url
        self._client = SchemaRegistryClient({"url": url, **(properties or {})})
        self._subjects = subjects
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, AvroSchema] = {}

    def id_of(self, schema: AvroSchema) -> int:
        with self._lock:
            if schema.fingerprint in self._ids:
                return self._ids[schema.fingerprint]
        subject = self._subjects[schema.full_name]
        registered = self._ask(
            lambda: self._client.lookup_schema(subject, self._schema(schema), normalize_schemas=True),
            unknown=RegistryError(
                f"Schema {schema.full_name} is not registered under {subject!r} at {self._url}.",
                hint="Run `echoswarm schemas register`.",
            ),
        )
        with self._lock:
            self._ids[schema.fingerprint] = int(registered.schema_id)
            return self._ids[schema.fingerprint]

    def schema_of(self, schema_id: int) -> AvroSchema:
        with self._lock:
            if schema_id in self._schemas:
                return self._schemas[schema_id]
        answer = self._ask(
            lambda: self._client.get_schema(schema_id),
            unknown=InvalidRecord(InvalidReason.UNKNOWN_SCHEMA, f"The registry at {self._url} does not know schema id {schema_id}."),
        )
        schema = known_version(parse_schema(json.loads(answer.schema_str)))
        with self._lock:
            self._schemas[schema_id] = schema
        return schema

    def register(self, schema: AvroSchema, compatibility: str) -> int:
        """Register `schema` under its subject at the given compatibility level; idempotent. Raises RegistryError if refused."""
        subject = self._subjects[schema.full_name]
        refused = RegistryError(f"The registry at {self._url} refused {schema.full_name} under {subject!r}.")
        self._ask(lambda: self._client.set_compatibility(subject, compatibility), unknown=refused)
        return int(self._ask(lambda: self._client.register_schema(subject, self._schema(schema)), unknown=refused))

    @staticmethod
    def _schema(schema: AvroSchema) -> Any:
        from confluent_kafka.schema_registry import Schema

        return Schema(schema.text, "AVRO")

    def _ask(self, question: Any, *, unknown: Exception) -> Any:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return question()
        except SchemaRegistryError as exc:
            if exc.http_status_code in {404, 409, 422}:
                if isinstance(unknown, RegistryError):
                    unknown.message = f"{unknown.message} It says: {exc.error_message}."
                raise unknown from exc
            raise RegistryError(f"The registry at {self._url} answered {exc.http_status_code}: {exc.error_message}.") from exc
        except Exception as exc:  # the client raises whatever its HTTP library raises; all of it means "no answer"
            raise RegistryError(
                f"The schema registry at {self._url} does not answer ({type(exc).__name__}).",
                hint="Check [registry] url, or leave it empty to use registry.lock.json.",
            ) from exc


def known_version(schema: AvroSchema) -> AvroSchema:
    """Our own file for a schema that came from a registry, or the schema itself when it is a newer producer's."""
    for known in all_schemas():
        if known.fingerprint == schema.fingerprint:
            return known
    return schema


def subject_of(physical: str, topic: Topic, full_name: str) -> str:
    """The subject of a record: `<topic>-value`, which tools assume, or `<topic>-<record>` where a topic carries several records."""
    return f"{physical}-value" if len(topic.records) == 1 else f"{physical}-{full_name}"


def subjects_of(physical_name: Any) -> dict[str, str]:
    """Schema full name → subject, for `physical_name: Topic → str`. A record on several topics is looked up under the first."""
    subjects: dict[str, str] = {}
    for topic in TOPICS:
        for record in topic.records:
            full_name = newest(record.SCHEMA).full_name
            subjects.setdefault(full_name, subject_of(physical_name(topic), topic, full_name))
    return subjects


def lock_label(schema: AvroSchema) -> str:
    """`trajectory.v1`: how the lock file names a schema."""
    return f"{schema.name}.v{schema.version}"


def load_lock() -> dict[str, int]:
    """The lock file's ids. Raises SchemaFileError if a fingerprint does not match its file: a schema was edited after it was locked."""
    content = json.loads((resources.files("echo_schemas") / "registry.lock.json").read_text(encoding="utf-8"))
    fingerprints = {lock_label(schema): schema.fingerprint for schema in all_schemas()}
    for label, entry in content.items():
        if label not in fingerprints:
            raise SchemaFileError(f"registry.lock.json names {label}, which has no file.", hint="A published schema is never removed.")
        if fingerprints[label] != entry["fingerprint"]:
            raise SchemaFileError(
                f"avro/{label}.avsc was edited after its id was locked.",
                hint="Undo the edit and add the next version instead.",
            )
    return {label: int(entry["id"]) for label, entry in content.items()}


def make_lock(existing: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`existing` with an id for every schema file that has none yet; ids are handed out in order and never reused."""
    lock = {label: dict(entry) for label, entry in existing.items()}
    next_id = max([FIRST_LOCK_ID - 1, *(int(entry["id"]) for entry in lock.values())]) + 1
    for schema in all_schemas():
        label = lock_label(schema)
        if label not in lock:
            lock[label] = {"id": next_id, "fingerprint": schema.fingerprint}
            next_id += 1
    return lock
