"""Whether a new schema version may be added: FULL_TRANSITIVE by Avro's own rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echo_schemas.schemas import AvroSchema, all_schemas


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """`reader` cannot read what `writer` wrote, and why."""

    reader: str
    writer: str
    why: str


def check_all() -> list[Incompatibility]:
    """Every pair of versions of every record, both ways."""
    names = sorted({schema.name for schema in all_schemas()})
    found: list[Incompatibility] = []
    for name in names:
        found += check_versions([schema for schema in all_schemas() if schema.name == name])
    return found


def check_versions(schemas: Sequence[AvroSchema]) -> list[Incompatibility]:
    """FULL_TRANSITIVE over the versions of one record: each reads all the others. Avro's rules, by Avro's own checker.

    REMOVE
    """
    found: list[Incompatibility] = []
    for reader in schemas:
        for writer in schemas:
            if reader is not writer:
                found += [Incompatibility(_label(reader), _label(writer), why) for why in _reasons(reader.raw, writer.raw)]
    return found


def _reasons(reader: dict[str, Any], writer: dict[str, Any]) -> Iterator[str]:
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
    from avro.schema import make_avsc_object

    result = ReaderWriterCompatibilityChecker().get_compatibility(make_avsc_object(reader), make_avsc_object(writer))
    if result.compatibility is not SchemaCompatibilityType.compatible:
        yield from (str(message) for message in result.messages)


def _label(schema: AvroSchema) -> str:
    return f"{schema.name}.v{schema.version}"
