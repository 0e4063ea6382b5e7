"""Whether a schema version may stand beside the earlier ones: Avro's rules of resolution, at the level that the topic files ask for.

Avro's own checker decides whether a reader can read what a writer wrote. It is laxer than a log that is kept for years needs, so three
rules come on top: a record keeps its full name, an enum keeps its symbols, and a default fits the first branch of its union.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from echo_schemas.errors import SchemaFileError
from echo_schemas.schemas import AvroSchema, all_schemas
from echo_schemas.topic_files import load_topic_specs


class Compatibility(StrEnum):
    """Who must be able to read whom, over all versions of a record. The names are those of Confluent's registry."""

    FULL_TRANSITIVE = "FULL_TRANSITIVE"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    NONE = "NONE"

    @property
    def new_reads_old(self) -> bool:
        """Whether a newer version must read what every older one wrote."""
        return self in {Compatibility.FULL_TRANSITIVE, Compatibility.BACKWARD_TRANSITIVE}

    @property
    def old_reads_new(self) -> bool:
        """Whether every older version must read what a newer one writes."""
        return self in {Compatibility.FULL_TRANSITIVE, Compatibility.FORWARD_TRANSITIVE}


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """`reader` cannot read, or would misread, what `writer` wrote, and why. Both are labels such as `trajectory.v2`."""

    reader: str
    writer: str
    why: str

    def __str__(self) -> str:
        return f"{self.reader} cannot read {self.writer}: {self.why}"


def check_all() -> list[Incompatibility]:
    """Every pair of versions of every record, at the level of its topics. Raises SchemaFileError for a schema that Avro refuses."""
    found: list[Incompatibility] = []
    for name in sorted({schema.name for schema in all_schemas()}):
        found += check_versions([schema for schema in all_schemas() if schema.name == name], level_of(name))
    return found


def level_of(name: str) -> Compatibility:
    """What the topic files ask of one record's schema: both ways as soon as any two of its topics together ask for both ways."""
    levels = [
        Compatibility(spec.compatibility)
        for spec in load_topic_specs()
        if spec.topic is not None and any(name == record.SCHEMA for record in spec.topic.records)
    ]
    backward, forward = any(level.new_reads_old for level in levels), any(level.old_reads_new for level in levels)
    if backward and forward:
        return Compatibility.FULL_TRANSITIVE
    if backward:
        return Compatibility.BACKWARD_TRANSITIVE
    return Compatibility.FORWARD_TRANSITIVE if forward else Compatibility.NONE


def check_versions(schemas: Sequence[AvroSchema], level: Compatibility = Compatibility.FULL_TRANSITIVE) -> list[Incompatibility]:
    """What stands against these versions of one record, oldest first. Empty if nothing does.

    Raises SchemaFileError for a schema that is not Avro at all, such as one with the same field twice.
    """
    found: list[Incompatibility] = []
    for position, new in enumerate(schemas):
        found += [Incompatibility(_label(new), _label(new), why) for why in _misplaced_defaults(new.raw)]
        for old in schemas[:position]:
            if level.new_reads_old:
                found += [Incompatibility(_label(new), _label(old), why) for why in _reasons(reader=new, writer=old)]
            if level.old_reads_new:
                found += [Incompatibility(_label(old), _label(new), why) for why in _reasons(reader=old, writer=new)]
            if level is not Compatibility.NONE:
                found += [Incompatibility(_label(new), _label(old), why) for why in _lost(old, new)]
    return found


def _reasons(*, reader: AvroSchema, writer: AvroSchema) -> Iterator[str]:
    """Avro's verdict; nothing if `reader` can read `writer`."""
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
        raise SchemaFileError(f"Schema {_label(schema)} is not valid Avro: {exc}.") from exc


def _lost(old: AvroSchema, new: AvroSchema) -> Iterator[str]:
    """What Avro lets go and a log must not: the record's name, by which readers know it, and symbols that old records hold."""
    if old.full_name != new.full_name:
        yield f"{old.full_name} became {new.full_name}; readers know a record by its full name."
    kept = dict(_enums(new.raw))
    for name, symbols in _enums(old.raw):
        if missing := [symbol for symbol in symbols if symbol not in kept.get(name, symbols)]:
            yield f"enum {name} lost {', '.join(missing)}; old records that hold it would be read as the default."


def _enums(node: Any) -> Iterator[tuple[str, list[str]]]:
    """(name, symbols) of every enum defined below `node`."""
    if isinstance(node, dict):
        if node.get("type") == "enum":
            yield node["name"], node["symbols"]
        for value in node.values():
            yield from _enums(value)
    elif isinstance(node, list):
        for item in node:
            yield from _enums(item)


def _misplaced_defaults(node: Any) -> Iterator[str]:
    """Fields whose default is not of their union's first branch: Avro before 1.12 refuses such a schema."""
    if isinstance(node, dict):
        union = node.get("type")
        if isinstance(union, list) and "default" in node and (node["default"] is None) != (union[0] == "null"):
            yield f"the default of {node['name']} is not of its union's first branch."
        for value in node.values():
            yield from _misplaced_defaults(value)
    elif isinstance(node, list):
        for item in node:
            yield from _misplaced_defaults(item)


def _label(schema: AvroSchema) -> str:
    return f"{schema.name}.v{schema.version}"
