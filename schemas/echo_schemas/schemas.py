"""The Avro schemas of all records, every version, read once from `avro/<name>.v<n>.avsc`."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import fastavro

from echo_schemas.errors import SchemaFileError

_FILE_NAME = re.compile(r"(?P<name>[a-z_]+)\.v(?P<version>[1-9][0-9]*)\.avsc")


@dataclass(frozen=True, slots=True, eq=False)
class AvroSchema:
    """One schema version. `raw`: the JSON of the file; `parsed`: fastavro's form; `fingerprint`: SHA-256 of the canonical form. `version`
    is 0 for a newer producer's schema, which came from a registry and is not one of our files."""

    name: str
    version: int
    full_name: str
    raw: dict[str, Any] = field(repr=False)
    parsed: Any = field(repr=False)
    fingerprint: str = field(repr=False)

    @property
    def label(self) -> str:
        """`trajectory.v1`: its name in messages and in the lock file."""
        return f"{self.name}.v{self.version}"

    @property
    def text(self) -> str:
        """Compact JSON, as a registry stores it."""
        return json.dumps(self.raw, ensure_ascii=False, separators=(",", ":"))


def parse_schema(raw: dict[str, Any], *, name: str = "", version: int = 0) -> AvroSchema:
    """An AvroSchema from JSON. The fingerprint covers everything that a reader uses: also defaults, not docs."""
    try:
        parsed: Any = fastavro.parse_schema(raw)
    except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, KeyError, TypeError) as exc:
        raise SchemaFileError(f"Schema {name or raw.get('name')!r} is not valid Avro: {exc!r}.") from exc
    full_name = str(parsed["name"])
    canonical = json.dumps(_without_docs(raw), sort_keys=True, separators=(",", ":"))
    fingerprint = hashlib.sha256(canonical.encode()).hexdigest()
    return AvroSchema(name or _short_name(full_name), version, full_name, raw, parsed, fingerprint)


@functools.cache
def all_schemas() -> tuple[AvroSchema, ...]:
    """Every schema file, ordered by name and version. Versions of a name are 1, 2, 3 … without a gap."""
    folder = resources.files("echo_schemas") / "avro"
    return parse_files({file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()})


def parse_files(files: Mapping[str, str]) -> tuple[AvroSchema, ...]:
    """The schemas of files, given as file name → text. Raises SchemaFileError for a misnamed file, a missing version, or invalid Avro."""
    found: list[AvroSchema] = []
    for file_name, text in files.items():
        match = _FILE_NAME.fullmatch(file_name)
        if match is None:
            raise SchemaFileError(f"avro/{file_name} is not named <record>.v<n>.avsc.")
        try:
            raw = json.loads(text)
        except ValueError as exc:
            raise SchemaFileError(f"avro/{file_name} is not JSON: {exc}.") from exc
        found.append(parse_schema(raw, name=match["name"], version=int(match["version"])))
    found.sort(key=lambda schema: (schema.name, schema.version))
    for name in {schema.name for schema in found}:
        numbers = [schema.version for schema in found if schema.name == name]
        if numbers != list(range(1, len(numbers) + 1)):
            raise SchemaFileError(f"The versions of {name} are {numbers}; they must be 1, 2, 3 … without a gap.")
    return tuple(found)


@functools.cache
def versions(name: str) -> tuple[AvroSchema, ...]:
    """All versions of one record's schema, oldest first. Raises SchemaFileError for an unknown name."""
    found = tuple(schema for schema in all_schemas() if schema.name == name)
    if not found:
        raise SchemaFileError(f"There is no schema file for the record {name!r}.")
    return found


def newest(name: str) -> AvroSchema:
    """The version that writers use."""
    return versions(name)[-1]


def _short_name(full_name: str) -> str:
    """`echoswarm.RolloutRequest` → `rollout_request`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", full_name.rpartition(".")[2]).lower()


def _without_docs(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_docs(value) for key, value in node.items() if key != "doc"}
    if isinstance(node, list):
        return [_without_docs(item) for item in node]
    return node
