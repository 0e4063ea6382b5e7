"""Records to bytes and back: Confluent's prefix (0x00, 4-byte big-endian schema id), then the Avro body.

Writers use the newest schema; readers accept any version that `SchemaIds` knows and resolve it into the newest. Thread-safe.
"""

from __future__ import annotations

import functools
import io
import struct
from typing import Any

import fastavro
from fastavro.read import SchemaResolutionError

from echo_schemas.converters import Converter, converter_of
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import RECORDS, Record
from echo_schemas.registry import LockFileRegistry, SchemaIds
from echo_schemas.schemas import newest
from echo_schemas.straight import Read, Write, reader_of, writer_of

MAGIC = 0
_PREFIX = struct.Struct(">bI")
# Errors of fastavro or a converter for values that do not fit the schema.
_UNFIT = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, struct.error)


_Writer = tuple[bytes, Write, Converter, Any]
"""The prefix of a record's newest schema, what writes it, and for fastavro a converter and the schema."""
_Reader = tuple[type[Record], Read | None, Converter, Any, Any]
"""The record of one schema id; what reads it, if that is the newest schema; and for fastavro a converter, the writer's schema, and the
reader's if it is another one."""


class Codec:
    """Encodes and decodes every record in `RECORDS`."""

    def __init__(self, ids: SchemaIds) -> None:
        self.ids = ids
        """The source of schema ids."""
        self._by_full_name = {newest(record.SCHEMA).full_name: record for record in RECORDS}
        self._writers: dict[type[Record], _Writer] = {}
        self._readers: dict[int, _Reader] = {}

    def encode(self, record: Record) -> bytes:
        """The bytes of `record`. Raises InvalidRecord if it contradicts itself, RegistryError if its schema has no id."""
        writer = self._writers.get(type(record))
        if writer is None:
            writer = self._writers[type(record)] = self._writer_of(type(record))
        prefix, write, converter, schema = writer
        try:
            record.validate()
            try:
                return write(record, prefix)
            except Exception:  # a value that only fastavro knows, or none does
                buffer = io.BytesIO()
                buffer.write(prefix)
                fastavro.schemaless_writer(buffer, schema, converter.to_plain(record))
                return buffer.getvalue()
        except _UNFIT as exc:
            raise InvalidRecord(
                InvalidReason.MALFORMED, f"A {type(record).__name__} holds a value that its schema does not allow: {exc}."
            ) from exc

    def decode(self, payload: bytes | None) -> Record:
        """The record of `payload`. Raises InvalidRecord, with the reason, for any bytes that are not one of our records."""
        if payload is None:
            raise InvalidRecord(InvalidReason.NULL_VALUE, "The value is null where a record is expected.")
        if len(payload) <= _PREFIX.size:
            raise InvalidRecord(InvalidReason.TRUNCATED, f"{len(payload)} bytes are too few for a schema id and a record.")
        magic, schema_id = _PREFIX.unpack_from(payload)
        if magic != MAGIC:
            raise InvalidRecord(InvalidReason.BAD_MAGIC, f"The first byte is {payload[0]:#04x}, not the 0x00 of Confluent's wire format.")
        reader = self._readers.get(schema_id)
        if reader is None:
            reader = self._readers[schema_id] = self._reader_of(schema_id)
        read = reader[1]
        if read is None:
            return _resolved(payload, reader)
        try:
            record: Record = read(payload, _PREFIX.size)
            record.validate()
        except InvalidRecord:
            raise
        except Exception:  # not as our writers write it: fastavro decides whether it is a record
            return _resolved(payload, reader)
        return record

    def _writer_of(self, record: type[Record]) -> _Writer:
        schema = newest(record.SCHEMA)
        return _PREFIX.pack(MAGIC, self.ids.id_of(schema)), writer_of(record, schema), converter_of(record), schema.parsed

    def _reader_of(self, schema_id: int) -> _Reader:
        schema = self.ids.schema_of(schema_id)
        record = self._by_full_name.get(schema.full_name)
        if record is None:
            raise InvalidRecord(InvalidReason.UNEXPECTED_RECORD, f"Schema id {schema_id} is {schema.full_name}, not one of our records.")
        own = newest(record.SCHEMA)
        if schema.fingerprint == own.fingerprint:
            return record, reader_of(record, own), converter_of(record), schema.parsed, None
        # Resolution costs time on every message: use it only if the versions differ.
        return record, None, converter_of(record), schema.parsed, own.parsed


def _resolved(payload: bytes, reader: _Reader) -> Record:
    """The record of `payload` by fastavro, which resolves other versions into the newest. Raises InvalidRecord."""
    cls, _, converter, writer_schema, reader_schema = reader
    buffer = io.BytesIO(payload)
    buffer.seek(_PREFIX.size)
    try:
        plain: Any = fastavro.schemaless_reader(buffer, writer_schema, reader_schema)
        record: Record = converter.from_plain(plain)
        if buffer.tell() != len(payload):
            raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, f"{len(payload) - buffer.tell()} bytes follow the {cls.__name__}.")
        record.validate()
    except SchemaResolutionError as exc:
        _, schema_id = _PREFIX.unpack_from(payload)
        raise InvalidRecord(
            InvalidReason.UNEXPECTED_RECORD,
            f"Schema id {schema_id} is a {cls.__name__} that our newest version cannot read: {exc}.",
            hint="The writer's schema is not compatible: run `echoswarm schemas check` where it was made.",
        ) from exc
    except InvalidRecord:
        raise
    except Exception as exc:  # on arbitrary bytes fastavro, a converter or a check may raise any error
        cut = buffer.tell() >= len(payload)
        raise InvalidRecord(
            InvalidReason.TRUNCATED if cut else InvalidReason.MALFORMED,
            f"The bytes are not those of a whole {cls.__name__} ({type(exc).__name__}).",
        ) from exc
    return record


@functools.cache
def lock_file_codec() -> Codec:
    """The codec of an installation without a schema registry."""
    return Codec(LockFileRegistry())
