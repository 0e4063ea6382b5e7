"""Sources of schema ids: a lock file in the package, or a Confluent-compatible registry. One interface for both."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Protocol

from echo_schemas.errors import EchoError, InvalidReason, InvalidRecord, NotRegistered, RegistryError, SchemaFileError, UserError
from echo_schemas.libraries import library_missing
from echo_schemas.schemas import AvroSchema, all_schemas, newest, parse_schema
from echo_schemas.topics import TOPICS, Topic

# Far above any id of a registry, so that ids written without a registry never collide with a registry's.
FIRST_LOCK_ID = 1_000_000_000
# The client's defaults are to wait without an end for an answer, and a minute between attempts; a starting process must know sooner.
_CLIENT_DEFAULTS = {"timeout": 5, "max.retries": 3, "retries.wait.ms": 200, "retries.max.wait.ms": 2_000}
# Not found, conflict and unprocessable: the registry understood the request and refuses it.
_REFUSALS = frozenset({404, 409, 422})


class SchemaIds(Protocol):
    """Schema ↔ id, the 4 bytes after the magic byte."""

    def id_of(self, schema: AvroSchema) -> int:
        """The id under which `schema` is written. Raises RegistryError if it is not registered."""

    def schema_of(self, schema_id: int) -> AvroSchema:
        """The schema of an id. Raises InvalidRecord (UNKNOWN_SCHEMA) for an unknown id, RegistryError if the registry does not answer."""


class LockFileRegistry:
    """Ids from `registry.lock.json`: fixed for ever in the repository; needs no service."""

    def __init__(self, ids: Mapping[str, int] | None = None, schemas: Iterable[AvroSchema] | None = None) -> None:
        self._by_id: dict[int, AvroSchema] = {}
        self._by_fingerprint: dict[str, int] = {}
        locked = load_lock() if ids is None else ids
        for schema in all_schemas() if schemas is None else schemas:
            label = schema.label
            if label not in locked:
                raise SchemaFileError(f"{label} has no id in registry.lock.json.", hint="Run `echoswarm schemas check --update-lock`.")
            self._by_id[locked[label]] = schema
            self._by_fingerprint[schema.fingerprint] = locked[label]

    def id_of(self, schema: AvroSchema) -> int:
        try:
            return self._by_fingerprint[schema.fingerprint]
        except KeyError:
            raise RegistryError(
                f"Schema {schema.label} is not in registry.lock.json, or was edited after it was locked.",
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
    """A Confluent-compatible registry over HTTP. Never registers by itself: `echoswarm schemas register` does. Thread-safe. Calls block, at
    most about half a minute if the registry does not answer. Every answer is cached for the life of the process, since ids never change."""

    def __init__(self, url: str, subjects: Mapping[str, Sequence[str]], properties: Mapping[str, Any] | None = None) -> None:
        """`subjects`: schema full name → the subjects under which it is registered (see `subjects_of`). `properties`: of confluent_kafka's
        SchemaRegistryClient. Raises UserError if the client refuses them."""
        # The text before an @ in a URL is a password.
        self._shown = re.sub(r"//[^/@]*@", "//", url)
        self._client = _open_client(url, self._shown, properties or {})
        # No caller closes a codec: close the connections with this object, not when the garbage collector finds them.
        weakref.finalize(self, self._client.close)
        self._subjects = subjects
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, AvroSchema] = {}

    def id_of(self, schema: AvroSchema) -> int:
        with self._lock:
            if schema.fingerprint in self._ids:
                return self._ids[schema.fingerprint]
        schema_id = self._look_up(schema, self._subjects_of(schema)[0])
        with self._lock:
            self._ids[schema.fingerprint] = schema_id
            return schema_id

    def _look_up(self, schema: AvroSchema, subject: str) -> int:
        """Raises NotRegistered, or RegistryError."""
        # Not normalised: the registry compares the text that `register` has sent.
        found: int = self._ask(
            lambda: int(self._client.lookup_schema(subject, _to_send(schema)).schema_id),
            refused=lambda answer: NotRegistered(
                f"Schema {schema.full_name} is not registered under {subject!r} at {self._shown} ({answer}).",
                hint="Run `echoswarm schemas register`.",
            ),
        )
        return found

    def schema_of(self, schema_id: int) -> AvroSchema:
        with self._lock:
            if schema_id in self._schemas:
                return self._schemas[schema_id]
        answer = self._ask(
            lambda: self._client.get_schema(schema_id),
            refused=lambda answer: InvalidRecord(
                InvalidReason.UNKNOWN_SCHEMA, f"The registry at {self._shown} does not know schema id {schema_id} ({answer})."
            ),
        )
        schema = _received(schema_id, answer)
        with self._lock:
            self._schemas[schema_id] = schema
        return schema

    def register(self, schema: AvroSchema, compatibility: str) -> int:
        """Register `schema` under each of its subjects at this compatibility level, and return its id; idempotent. Raises RegistryError if
        the registry refuses, as it does for an incompatible schema."""
        ids = [self._register_under(subject, schema, compatibility) for subject in self._subjects_of(schema)]
        return ids[0]

    def missing(self, schema: AvroSchema) -> dict[str, bool]:
        """The subjects under which `schema` is not registered, and whether it is compatible with their versions. Raises RegistryError."""
        found = {}
        for subject in self._subjects_of(schema):
            try:
                self._look_up(schema, subject)
            except NotRegistered:
                found[subject] = self._is_compatible(schema, subject)
        return found

    def _is_compatible(self, schema: AvroSchema, subject: str) -> bool:
        try:
            return bool(self._ask(lambda: self._client.test_compatibility(subject, _to_send(schema)), refused=NotRegistered))
        except NotRegistered:
            # The subject has no version yet.
            return True

    def _register_under(self, subject: str, schema: AvroSchema, compatibility: str) -> int:
        def refused(answer: str) -> RegistryError:
            return RegistryError(f"The registry at {self._shown} refused {schema.full_name} under {subject!r}: {answer}.")

        self._ask(lambda: self._client.set_compatibility(subject, compatibility), refused=refused)
        found: int = self._ask(lambda: int(self._client.register_schema(subject, _to_send(schema))), refused=refused)
        return found

    def _subjects_of(self, schema: AvroSchema) -> Sequence[str]:
        subjects = self._subjects.get(schema.full_name)
        if not subjects:
            raise RegistryError(f"No topic carries {schema.full_name}, so it has no subject in the registry.")
        return subjects

    def _ask(self, question: Callable[[], Any], *, refused: Callable[[str], EchoError]) -> Any:
        """The answer to `question`. If the registry refuses the request, raises the error that `refused` makes of its message."""
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return question()
        except SchemaRegistryError as exc:
            if exc.http_status_code in _REFUSALS:
                raise refused(str(exc.error_message)) from exc
            denied = exc.http_status_code in {401, 403}
            raise RegistryError(
                f"The registry at {self._shown} answered {exc.http_status_code}: {exc.error_message}.",
                hint="Check [registry] user and password_file." if denied else "",
            ) from exc
        except Exception as exc:  # the client raises any error of its HTTP library; each one means "no answer"
            raise RegistryError(
                f"The schema registry at {self._shown} does not answer ({type(exc).__name__}).",
                hint="Check [registry] url, or leave it empty to use registry.lock.json.",
            ) from exc


def _open_client(url: str, shown: str, properties: Mapping[str, Any]) -> Any:
    """confluent_kafka's client. Raises UserError if it is not installed or refuses its properties."""
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as exc:
        raise library_missing("[registry] url", exc.name, "'echoswarm[registry]'") from exc
    try:
        return SchemaRegistryClient({"url": url, **_CLIENT_DEFAULTS, **properties})
    except (ValueError, TypeError, OSError) as exc:
        raise UserError(
            f"The schema registry at {shown} cannot be used: {str(exc).replace(url, shown)}.",
            hint="Check [registry] url, user, password_file and ca_file.",
        ) from exc


def _to_send(schema: AvroSchema) -> Any:
    from confluent_kafka.schema_registry import Schema

    return Schema(schema.text, "AVRO")


def _received(schema_id: int, answer: Any) -> AvroSchema:
    """The registry's schema as ours. Raises InvalidRecord unless it is an Avro record's: else the message is not ours."""
    try:
        if answer.schema_type not in {None, "AVRO"}:
            raise ValueError(answer.schema_type)
        schema = parse_schema(json.loads(answer.schema_str))
        # Our own file; a newer producer's schema has none here.
        return next((known for known in all_schemas() if known.fingerprint == schema.fingerprint), schema)
    except (ValueError, TypeError, KeyError, AttributeError, SchemaFileError) as exc:
        raise InvalidRecord(InvalidReason.UNEXPECTED_RECORD, f"Schema id {schema_id} is not an Avro record's ({exc}).") from exc


def subject_of(physical: str, topic: Topic, full_name: str) -> str:
    """The subject of a record: `<topic>-value`, which tools expect, or `<topic>-<record>` if a topic carries several records."""
    return f"{physical}-value" if len(topic.records) == 1 else f"{physical}-{full_name}"


def subjects_of(physical_name: Callable[[Topic], str]) -> dict[str, tuple[str, ...]]:
    """Schema full name → its subjects, one for each topic that carries the record."""
    subjects: dict[str, tuple[str, ...]] = {}
    for topic in TOPICS:
        for record in topic.records:
            full_name = newest(record.SCHEMA).full_name
            subjects[full_name] = (*subjects.get(full_name, ()), subject_of(physical_name(topic), topic, full_name))
    return subjects


def load_lock() -> dict[str, int]:
    """The lock file's ids, label → id. Raises SchemaFileError if a schema was edited after it was locked, was removed, or shares its id."""
    return check_lock(json.loads((resources.files("echo_schemas") / "registry.lock.json").read_text(encoding="utf-8")))


def check_lock(content: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The ids of a lock file's content, with the checks of `load_lock`."""
    fingerprints = {schema.label: schema.fingerprint for schema in all_schemas()}
    for label, entry in content.items():
        if label not in fingerprints:
            raise SchemaFileError(f"registry.lock.json names {label}, which has no file.", hint="A published schema is never removed.")
        if fingerprints[label] != entry["fingerprint"]:
            raise SchemaFileError(
                f"avro/{label}.avsc was edited after its id was locked.", hint="Undo the edit and add the next version instead."
            )
    ids = {label: int(entry["id"]) for label, entry in content.items()}
    if len(set(ids.values())) < len(ids):
        raise SchemaFileError(
            "registry.lock.json gives one id to two schemas.",
            hint="Two branches added a schema at once: delete the newer entry and run `echoswarm schemas check --update-lock`.",
        )
    return ids


def make_lock(existing: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`existing` with a new id for every schema file without one; ids are given in order and never reused."""
    lock = {label: dict(entry) for label, entry in existing.items()}
    next_id = max([FIRST_LOCK_ID - 1, *(int(entry["id"]) for entry in lock.values())]) + 1
    for schema in all_schemas():
        label = schema.label
        if label not in lock:
            lock[label] = {"id": next_id, "fingerprint": schema.fingerprint}
            next_id += 1
    return lock
