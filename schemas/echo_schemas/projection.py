"""Reads a few fields of an Avro record without decoding the rest, for readers of millions of records.

fastavro with a smaller reader schema builds every value before it drops it, and is no faster than a whole decode. Here a function is
generated from the writer's schema, as straight-line code: it reads lengths, steps over other fields, and stops after the last wanted one.
So it does not check whether the whole record is valid; the codec does.

Texts come as UTF-8 bytes, enumerations as their symbols. Wire format: Avro 1.11 specification, "Binary Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import Record
from echo_schemas.registry import SchemaIds
from echo_schemas.schemas import AvroSchema, newest
from echo_schemas.varints import READ_CODED, READ_NUMBER, READ_SCOPE

Extract = Callable[[bytes, int], tuple[Any, ...]]
"""The wanted fields of the record that begins at a position. Raises IndexError or ValueError if the bytes end too early."""

_PREFIX = struct.Struct(">bI")
_START = _PREFIX.size
_DOUBLE = struct.Struct("<d")
_FIXED = {"float": 4, "double": 8, "boolean": 1}


class Projection:
    """The same fields of one kind of record, for all versions of its schema. Not thread-safe."""

    def __init__(self, record: type[Record], fields: Sequence[str], ids: SchemaIds) -> None:
        """`fields` are numbers, texts, bytes or enumerations of the newest schema, or a union of one with null; `of.partition` is a field
        of the record in the field `of`. A field that an older writer lacks has the newest schema's default."""
        self._record = record
        self._fields = tuple(fields)
        self._ids = ids
        self._extracts: dict[bytes, Extract] = {}

    def read(self, payload: bytes | None) -> tuple[Any, ...]:
        """The fields, in the order of `fields`. Raises InvalidRecord if the payload is no such record; RegistryError."""
        if payload is None:
            raise InvalidRecord(InvalidReason.NULL_VALUE, "The value is null where a record is expected.")
        extract = self._extracts.get(payload[:_START])
        if extract is None:
            extract = self._extracts[payload[:_START]] = self._extract_of(payload)
        try:
            return extract(payload, _START)
        except (IndexError, ValueError, struct.error) as exc:
            raise InvalidRecord(InvalidReason.TRUNCATED, f"The bytes are not those of a whole {self._record.__name__}.") from exc

    def _extract_of(self, payload: bytes) -> Extract:
        if len(payload) <= _START:
            raise InvalidRecord(InvalidReason.TRUNCATED, f"{len(payload)} bytes are too few for a schema id and a record.")
        magic, schema_id = _PREFIX.unpack_from(payload)
        if magic:
            raise InvalidRecord(InvalidReason.BAD_MAGIC, f"The first byte is {magic:#04x}, not the 0x00 of Confluent's wire format.")
        schema, reader = self._ids.schema_of(schema_id), newest(self._record.SCHEMA)
        if schema.full_name != reader.full_name:
            raise InvalidRecord(InvalidReason.UNEXPECTED_RECORD, f"Schema id {schema_id} is {schema.full_name}, not {reader.full_name}.")
        return compile_extract(schema, self._fields, reader)


def compile_extract(writer: AvroSchema, fields: Sequence[str], reader: AvroSchema) -> Extract:
    """A function that reads `fields` of a record of `writer`; fields that `writer` lacks have their default in `reader`."""
    known = {field["name"]: field["type"] for field in writer.parsed["fields"]}
    defaults = {field["name"]: field["default"] for field in reader.parsed["fields"] if "default" in field}
    wanted = {name for name in fields if name.partition(".")[0] in known}
    lines = ["def generated(data, at):"]
    symbols: dict[str, Any] = {}
    left = set(wanted)
    named = dict(_named(writer.parsed))
    for name, kind in known.items():
        if not left:
            break
        inner = {field for field in left if field.startswith(f"{name}.")}
        if name in left:
            left.remove(name)
            lines += [f"    {line}" for line in _read(_variable(name), name, kind, symbols)]
        elif inner:
            left -= inner
            for field in named.get(kind, kind)["fields"] if isinstance(kind, str) else kind["fields"]:
                path = f"{name}.{field['name']}"
                does = _read(_variable(path), path, field["type"], symbols) if path in inner else _skip(field["type"], named)
                lines += [f"    {line}" for line in does]
        else:
            lines += [f"    {line}" for line in _skip(kind, named)]
    lines += [f"    {_variable(name)} = {_default(defaults[name])!r}" for name in fields if name not in wanted]
    # A field that was stepped over may reach beyond the end without an IndexError.
    lines += ["    if at > len(data): raise IndexError(at)", f"    return ({', '.join(_variable(name) for name in fields)},)"]
    scope: dict[str, Any] = {**READ_SCOPE, "double": _DOUBLE.unpack_from, **symbols}
    exec("\n".join(lines), scope)  # noqa: S102  the source is made above, of field names of our own schemas only
    generated: Extract = scope["generated"]
    return generated


def _variable(name: str) -> str:
    return f"v_{name.replace('.', '_')}"


def _default(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _read(target: str, name: str, kind: Any, scope: dict[str, Any]) -> list[str]:
    """Lines that set `target` to the value at `at` and move `at` behind it."""
    if isinstance(kind, dict) and kind["type"] == "enum":
        symbols = f"symbols{target}"
        scope[symbols] = tuple(symbol.encode() for symbol in kind["symbols"])
        return [*READ_CODED, f"{target} = {symbols}[n >> 1]"]
    if kind in ("int", "long"):
        return [*READ_NUMBER, f"{target} = n"]
    if kind in ("string", "bytes"):
        return [*READ_CODED, "end = at + (n >> 1)", f"{target} = data[at:end]", "at = end"]
    if kind == "double":
        return [f"{target} = double(data, at)[0]; at += 8"]
    if isinstance(kind, list) and len(kind) == 2 and "null" in kind:
        null = kind.index("null")
        does = _read(target, name, kind[1 - null], scope)
        return [
            *READ_CODED,
            f"if n == {2 * null}: {target} = None",
            f"elif n == {2 - 2 * null}:",
            *(f"    {line}" for line in does),
            "else: raise ValueError(n)",
        ]
    message = f"The field {name} of type {kind} is not one that a projection reads."
    raise TypeError(message)


def _named(kind: Any) -> Iterator[tuple[str, Any]]:
    """Every record and enumeration that is defined in a schema, by its name."""
    if isinstance(kind, list):
        for branch in kind:
            yield from _named(branch)
    elif isinstance(kind, dict):
        if "name" in kind and kind.get("type") in ("record", "enum"):
            yield kind["name"], kind
        for inner in (kind.get("items"), kind.get("values"), *(field["type"] for field in kind.get("fields", ()))):
            yield from _named(inner)


def _skip(kind: Any, named: Mapping[str, Any]) -> Iterator[str]:
    """Lines that move `at` behind a value. `named`: types that the schema refers to by name."""
    kind = named.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(kind, dict) and kind["type"] == "record":
        for field in kind["fields"]:
            yield from _skip(field["type"], named)
    elif isinstance(kind, dict) and kind["type"] in ("array", "map"):
        yield from _skip_array(kind, named)
    elif isinstance(kind, list):
        yield from READ_CODED
        for index, branch in enumerate(kind):
            body = list(_skip(branch, named)) or ["pass"]
            yield f"{'if' if index == 0 else 'elif'} n == {2 * index}:"
            yield from (f"    {line}" for line in body)
        yield "else: raise ValueError(n)"
    elif kind in ("string", "bytes"):
        yield from READ_CODED
        yield "at += n >> 1"
    elif kind in ("int", "long") or (isinstance(kind, dict) and kind["type"] == "enum"):
        yield from READ_CODED
    elif isinstance(kind, str) and kind in _FIXED:
        yield f"at += {_FIXED[kind]}"
    elif kind != "null":
        message = f"A value of type {kind} is not one that a projection steps over."
        raise TypeError(message)


def _skip_array(kind: dict[str, Any], named: Mapping[str, Any]) -> Iterator[str]:
    """Blocks of items, each with its count and, if that is negative, its size in bytes; a count of 0 ends them."""
    items = kind["items"] if kind["type"] == "array" else kind["values"]
    yield "while True:"
    yield from (f"    {line}" for line in READ_CODED)
    yield "    if not n: break"
    yield "    if n & 1:"
    yield from (f"        {line}" for line in READ_CODED)
    yield "        at += n >> 1"
    yield "        continue"
    yield "    for _ in range(n >> 1):"
    yield from (f"        {line}" for line in (_skip("string", named) if kind["type"] == "map" else ()))
    yield from (f"        {line}" for line in (list(_skip(items, named)) or ["pass"]))
