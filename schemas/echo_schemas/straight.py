"""Writes and reads whole records of the newest schemas, with straight-line code generated from dataclass and schema.

fastavro walks the schema for each value and goes through a dictionary, which takes two to four times as long for thirty small fields.
This code knows only what our own writers write: unions with null first, arrays and maps in one block, numbers within 64 bits. For
anything else it raises some error, and the codec then asks fastavro, which decides and says what is wrong.

Wire format: Avro 1.11 specification, "Binary Encoding"; numbers: `varints`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import struct
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from echo_schemas.converters import twin_of
from echo_schemas.schemas import AvroSchema
from echo_schemas.varints import READ_CODED, READ_NUMBER, READ_SCOPE, WRITE_SCOPE, coded, write_number

Write = Callable[[Any, bytes], bytes]
"""The bytes of a record behind a prefix. Raises any error for a value that it does not know."""
Read = Callable[[bytes, int], Any]
"""The record that begins at a position and ends with the bytes. Raises any error for bytes that it does not know."""

_DOUBLE = struct.Struct("<d")
_PLAIN = {"string": str, "bytes": bytes, "int": int, "long": int, "double": float, "boolean": bool}


def writer_of(cls: type[Any], schema: AvroSchema) -> Write:
    """Made once a class. Raises TypeError if class and schema differ, or hold a type that no record has."""
    code = _Code(schema)
    lines = ["parts = [prefix]", "add = parts.append", *code.write_record("value", cls, schema.parsed), "return join(parts)"]
    write: Write = code.function("value, prefix", lines)
    return write


def reader_of(cls: type[Any], schema: AvroSchema) -> Read:
    """As `writer_of`, for bytes that were written with the same schema."""
    code = _Code(schema)
    lines = [*code.read_record("record", cls, schema.parsed), "if at != len(data):", "    raise ValueError", "return record"]
    read: Read = code.function("data, at", lines)
    return read


class _Code:
    """The lines of one function, and the objects that they name."""

    def __init__(self, schema: AvroSchema) -> None:
        self._declared: Mapping[str, Any] = schema.parsed["__named_schemas"]
        self._scope: dict[str, Any] = {
            "join": b"".join,
            **READ_SCOPE,
            **WRITE_SCOPE,
            "pack_double": _DOUBLE.pack,
            "unpack_double": _DOUBLE.unpack_from,
        }
        self._numbers = itertools.count()

    def function(self, parameters: str, lines: list[str]) -> Any:
        source = "\n".join([f"def generated({parameters}):", *_indented(lines), ""])
        exec(source, self._scope)  # noqa: S102  the source is made here, of our own classes and schemas only
        return self._scope["generated"]

    def write_record(self, value: str, cls: type[Any], schema: Any) -> list[str]:
        lines = []
        for name, hint, declared in _fields(cls, schema):
            field = self._new("field")
            lines += [f"{field} = {value}.{name}", *self._write(field, hint, declared)]
        return lines

    def _write(self, value: str, hint: Any, schema: Any) -> list[str]:
        schema = self._declared.get(schema, schema) if isinstance(schema, str) else schema
        kind = _kind_of(hint, schema)
        match kind:
            case "string":
                data = self._new("data")
                return [f"{data} = {value}.encode()", *_write_length(data), f"add({data})"]
            case "bytes":
                return [*_write_length(value), f"add({value})"]
            case "int" | "long":
                return [write_number(value)]
            case "double":
                return [f"add(pack_double({value}))"]
            case "boolean":
                return [f'add(b"\\x01" if {value} else b"\\x00")']
            case "enum":
                return [f"add({self._name({symbol: coded(at) for at, symbol in enumerate(schema['symbols'])})}[{value}])"]
            case "optional":
                return [
                    f"if {value} is None:",
                    '    add(b"\\x00")',
                    "else:",
                    '    add(b"\\x02")',
                    *_indented(self._write(value, *_inner(hint, schema))),
                ]
            case "array":
                item = self._new("item")
                lines = [f"for {item} in {value}:", *_indented(self._write(item, typing.get_args(hint)[0], schema["items"]))]
            case "map":
                key, item = self._new("key"), self._new("item")
                each = [*self._write(key, str, "string"), *self._write(item, typing.get_args(hint)[1], schema["values"])]
                lines = [f"for {key}, {item} in {value}.items():", *_indented(each)]
            case _:
                return self.write_record(value, hint, schema)
        return [f"if len({value}):", *_indented([*_write_length(value), *lines]), 'add(b"\\x00")']

    def read_record(self, target: str, cls: type[Any], schema: Any) -> list[str]:
        twin = twin_of(cls)
        record = self._new("record")
        lines = [f"{record} = {self._name(functools.partial(twin.__new__, twin))}()"]
        fields = list(_fields(cls, schema))
        while fields:
            first, hint, declared = fields[0]
            last = dict(getattr(cls, "REPEATED", ())).get(first)
            if last is None:
                lines += self._read(f"{record}.{first}", hint, declared)
                del fields[0]
            else:
                num = [name for name, _, _ in fields].index(last) + 1
                lines += self._read_repeated(record, fields[:num])
                del fields[:num]
        return [*lines, f"{record}.__class__ = {self._name(cls)}", f"{target} = {record}"]

    def _read_repeated(self, record: str, fields: list[tuple[str, Any, Any]]) -> list[str]:
        """Neighbouring fields that mostly have the bytes of the record before: then its values are taken, which are immutable."""
        known, length, some, values = (self._new(word) for word in ("known", "length", "some", "values"))
        # One tuple in a list of one: another thread sees the whole of it or the one before.
        self._scope[known] = [(0, None, ())]
        targets = ", ".join(f"{record}.{name}" for name, _, _ in fields)
        lines = [line for name, hint, declared in fields for line in self._read(f"{record}.{name}", hint, declared)]
        return [
            f"{length}, {some}, {values} = {known}[0]",
            f"if data[at:at + {length}] == {some}:",
            f"    at += {length}",
            f"    {targets} = {values}",
            "else:",
            *_indented(["begun = at", *lines]),
            # A text that is cut off ends behind the data; the record is refused at its end.
            "    if at <= len(data):",
            f"        {known}[0] = at - begun, data[begun:at], ({targets})",
        ]

    def _read(self, target: str, hint: Any, schema: Any) -> list[str]:
        schema = self._declared.get(schema, schema) if isinstance(schema, str) else schema
        kind = _kind_of(hint, schema)
        match kind:
            case "string":
                return [*_READ_LENGTH, f"{target} = data[at:end].decode()", "at = end"]
            case "bytes":
                return [*_READ_LENGTH, f"{target} = data[at:end]", "at = end"]
            case "int" | "long":
                return [*READ_NUMBER, f"{target} = n"]
            case "double":
                return [f"{target} = unpack_double(data, at)[0]", "at += 8"]
            case "boolean":
                return [f"{target} = data[at] != 0", "at += 1"]
            case "enum":
                members = {at: hint(symbol) for at, symbol in enumerate(schema["symbols"])}
                return [*READ_NUMBER, f"{target} = {self._name(members)}[n]"]
            case "optional":
                inner = _indented(self._read(target, *_inner(hint, schema)))
                return [
                    "n = data[at]",
                    "at += 1",
                    "if n == 0:",
                    f"    {target} = None",
                    "elif n == 2:",
                    *inner,
                    "else:",
                    "    raise ValueError",
                ]
            case "array":
                found, item = self._new("found"), self._new("item")
                each = [*self._read(item, typing.get_args(hint)[0], schema["items"]), f"{found}.append({item})"]
                return [f"{found} = []", *self._read_blocks(each), f"{target} = tuple({found})"]
            case "map":
                found, key, item = self._new("found"), self._new("key"), self._new("item")
                each = [
                    *self._read(key, str, "string"),
                    *self._read(item, typing.get_args(hint)[1], schema["values"]),
                    f"{found}[{key}] = {item}",
                ]
                return [f"{found} = {{}}", *self._read_blocks(each), f"{target} = {found}"]
            case _:
                return self.read_record(target, hint, schema)

    def _read_blocks(self, each: list[str]) -> list[str]:
        """Items until an empty block. Each takes a byte at least, so a count that is too large ends with the data."""
        inside = ["if n < 0:", "    raise ValueError", "for _ in range(n):", *_indented(each), *READ_NUMBER]
        return [*READ_NUMBER, "while n:", *_indented(inside)]

    def _name(self, thing: Any) -> str:
        name = self._new("known")
        self._scope[name] = thing
        return name

    def _new(self, word: str) -> str:
        return f"{word}_{next(self._numbers)}"


# The place of the next text or bytes into `at` and `end`.
_READ_LENGTH = (*READ_CODED, "if n & 1:", "    raise ValueError", "end = at + (n >> 1)")


def _write_length(value: str) -> list[str]:
    return [f"n = len({value})", write_number("n")]


def _fields(cls: type[Any], schema: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and declared type of each field."""
    hints = typing.get_type_hints(cls)
    for field, declared in zip(dataclasses.fields(cls), schema["fields"], strict=True):
        if field.name != declared["name"]:
            raise TypeError(f"{cls.__name__}.{field.name} is {declared['name']!r} in the schema.")
        yield field.name, hints[field.name], declared["type"]


def _kind_of(hint: Any, schema: Any) -> str:
    """`optional`, `record`, or the schema's own word. Raises TypeError."""
    if isinstance(schema, list):
        if len(schema) == 2 and schema[0] == "null" and typing.get_origin(hint) in (typing.Union, types.UnionType):
            return "optional"
    elif isinstance(schema, str):
        if _PLAIN.get(schema) is hint:
            return schema
    else:
        word = str(schema["type"])
        origin = typing.get_origin(hint)
        fits = {
            "record": dataclasses.is_dataclass(hint),
            "enum": isinstance(hint, type) and issubclass(hint, enum.StrEnum),
            "array": origin is tuple,
            "map": origin is not None and issubclass(origin, Mapping),
        }
        if fits.get(word):
            return word
    raise TypeError(f"A field of type {hint!r} cannot be {schema!r}.")


def _inner(hint: Any, schema: Any) -> tuple[Any, Any]:
    (inner,) = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    return inner, schema[1]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
