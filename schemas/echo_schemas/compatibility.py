"""Checks that all versions of a schema are compatible: FULL_TRANSITIVE, so every version must read every other one (Avro's resolution).

Avro's own checker decides whether a reader can read a writer's records. A log that is kept for years needs three more rules: a record keeps
its full name, an enum keeps its symbols, and a default fits the first branch of its union.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from echo_schemas.errors import SchemaFileError
from echo_schemas.schemas import AvroSchema, all_schemas


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """`reader` cannot read, or would misread, the records of `writer`. Both are labels such as `trajectory.v2`."""

    reader: str
    writer: str
    why: str

    def __str__(self) -> str:
        return f"{self.reader} cannot read {self.writer}: {self.why}"


def check_all() -> list[Incompatibility]:
    """Every pair of versions of every record. Raises SchemaFileError for a schema that Avro refuses."""
    by_record = groupby(all_schemas(), key=lambda schema: schema.name)
    return [problem for _, versions in by_record for problem in check_versions(list(versions))]


def check_versions(schemas: Sequence[AvroSchema]) -> list[Incompatibility]:
    """The incompatible pairs among the versions of one record, oldest first. Raises SchemaFileError for a schema that is not valid Avro,
    such as one with the same field twice."""
    found: list[Incompatibility] = []
    for position, new in enumerate(schemas):
        found += [Incompatibility(new.label, new.label, why) for why in _misplaced_defaults(new.raw)]
        for old in schemas[:position]:
            found += [Incompatibility(new.label, old.label, why) for why in _reasons(reader=new, writer=old)]
            found += [Incompatibility(old.label, new.label, why) for why in _reasons(reader=old, writer=new)]
            found += [Incompatibility(new.label, old.label, why) for why in _lost(old, new)]
    return found


def _reasons(*, reader: AvroSchema, writer: AvroSchema) -> Iterator[str]:
    """Why Avro's checker says that `reader` cannot read `writer`; nothing if it can."""
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

    result = ReaderWriterCompatibilityChecker().get_compatibility(_avro(reader), _avro(writer))
    if result.compatibility is not SchemaCompatibilityType.compatible:
        kinds = ", ".join(sorted({kind.value.replace("_", " ") for kind in result.incompatibilities}))
        places = ", ".join(sorted(place for place in result.locations if place != "/")) or "/"
        yield f"{kinds} at {places} ({', '.join(sorted(map(str, result.messages)))})."


def _avro(schema: AvroSchema) -> Any:
    from avro.errors import AvroException
    from avro.schema import make_avsc_object

    try:
        return make_avsc_object(schema.raw)
    except AvroException as exc:
        raise SchemaFileError(f"Schema {schema.label} is not valid Avro: {exc}.") from exc


def _lost(old: AvroSchema, new: AvroSchema) -> Iterator[str]:
    """Changes that Avro allows and a log must not: of the record's name, by which readers find it, and of symbols in old records."""
    if old.full_name != new.full_name:
        yield f"{old.full_name} became {new.full_name}; readers know a record by its full name."
    kept = {node["name"]: node["symbols"] for node in _objects(new.raw) if node.get("type") == "enum"}
    for node in _objects(old.raw):
        name, symbols = node.get("name"), node.get("symbols", ())
        if missing := [symbol for symbol in symbols if symbol not in kept.get(name, symbols)]:
            yield f"enum {name} lost {', '.join(missing)}; old records that hold it would be read as the default."


def _misplaced_defaults(schema: Any) -> Iterator[str]:
    """Fields whose default does not fit their union's first branch: Avro before 1.12 refuses such a schema."""
    for node in _objects(schema):
        union = node.get("type")
        if isinstance(union, list) and "default" in node and (node["default"] is None) != (union[0] == "null"):
            yield f"the default of {node['name']} is not of its union's first branch."


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in `node`, itself included."""
    if isinstance(node, dict):
        yield node
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _objects(inner)
