"""Converts between a record dataclass and the plain dictionary of fastavro; derived once per class from its annotations."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Fix = Callable[[Any], Any]
T = TypeVar("T")
_PLAIN = (str, bytes, int, float, bool)


class Converter:
    """Converts one dataclass, with two functions generated as straight-line code, as `dataclasses` generates `__init__`. Every message is
    converted twice, and a loop over thirty fields would cost as much as Avro itself. Fields that Avro represents directly (numbers, text,
    bytes) are copied; the others have a fix for each direction."""

    __slots__ = ("from_plain", "to_plain")

    def __init__(self, cls: type[Any]) -> None:
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        fixes = {name: _fixes_for(hints[name]) for name in names}
        self.to_plain: Callable[[Any], dict[str, Any]] = _generate(_writer_source(fixes), fixes, 0, {})
        """The dictionary that fastavro writes."""
        twin = twin_of(cls)
        self.from_plain: Callable[[dict[str, Any]], Any] = _generate(
            _reader_source(fixes), fixes, 1, {"new": twin.__new__, "twin": twin, "cls": cls}
        )
        """The record of a dictionary that fastavro read."""


def twin_of(cls: type[Any]) -> type[Any]:
    """A class with the slots of the dataclass `cls`. A frozen dataclass sets each field through object.__setattr__; the twin allows plain
    assignments, and a complete object's class is replaced by the real one."""
    return type(cls.__name__, cls.__bases__, {"__slots__": tuple(field.name for field in dataclasses.fields(cls))})


def maker_of(cls: type[T]) -> type[T]:
    """A function that makes objects of the dataclass `cls` from all of its fields by name, for records that are made by the thousand. The
    class itself calls object.__setattr__ for each field, which takes longer for a trajectory than to encode it. Make it once."""
    twin = twin_of(cls)
    names = [field.name for field in dataclasses.fields(typing.cast("type[Any]", cls))]
    # Own names begin with an underscore, which no field does.
    lines = ["_made = _new()", *(f"_made.{name} = {name}" for name in names), "_made.__class__ = _cls", "return _made"]
    source = "\n".join([f"def generated(*, {', '.join(names)}):", *(f"    {line}" for line in lines), ""])
    made: type[T] = _generate(source, {}, 0, {"_new": functools.partial(twin.__new__, twin), "_cls": cls})
    return made


def _writer_source(fixes: Mapping[str, tuple[Fix | None, Fix | None]]) -> str:
    items = ", ".join(
        f"{name!r}: value.{name}" if encode is None else f"{name!r}: fix_{name}(value.{name})" for name, (encode, _) in fixes.items()
    )
    return f"def generated(value):\n    return {{{items}}}\n"


def _reader_source(fixes: Mapping[str, tuple[Fix | None, Fix | None]]) -> str:
    lines = [
        f"    record.{name} = plain[{name!r}]" if decode is None else f"    record.{name} = fix_{name}(plain[{name!r}])"
        for name, (_, decode) in fixes.items()
    ]
    return "\n".join(
        [
            "def generated(plain):",
            "    record = new(twin)",
            *lines,
            "    record.__class__ = cls",
            "    return record",
            "",
        ]
    )


def _generate(source: str, fixes: Mapping[str, tuple[Fix | None, Fix | None]], way: int, names: dict[str, Any]) -> Any:
    scope = {**names, **{f"fix_{name}": pair[way] for name, pair in fixes.items()}}
    exec(source, scope)  # noqa: S102  the source is made above, of field names of our own classes only
    return scope["generated"]


_converters: dict[type[Any], Converter] = {}


def converter_of(cls: type[Any]) -> Converter:
    """The cached converter of a dataclass. Two threads that ask at the same time may make two equal ones."""
    converter = _converters.get(cls)
    if converter is None:
        converter = _converters[cls] = Converter(cls)
    return converter


def _fixes_for(hint: Any) -> tuple[Fix | None, Fix | None]:
    """(encode, decode) of a value of type `hint`; None where the value is copied."""
    if hint in _PLAIN:
        return None, None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional_fixes(hint, arguments)
    if origin is tuple:
        return _sequence_fixes(arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        # Copied when encoding, so that a read-only mapping can be written too.
        return dict, None
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return None, {member.value: member for member in hint}.__getitem__
    if dataclasses.is_dataclass(hint):
        nested = converter_of(typing.cast("type[Any]", hint))
        return nested.to_plain, nested.from_plain
    message = f"A record field of type {hint!r} has no Avro form."
    raise TypeError(message)


def _sequence_fixes(item: Any) -> tuple[Fix | None, Fix | None]:
    encode, decode = _fixes_for(item)

    def encode_all(values: tuple[Any, ...]) -> list[Any]:
        return [encode(value) for value in values] if encode is not None else list(values)

    def decode_all(values: list[Any]) -> tuple[Any, ...]:
        # A list comprehension takes half the time of a generator for the one or two spans of most trajectories.
        return tuple([decode(value) for value in values]) if decode is not None else tuple(values)

    return encode_all, decode_all


def _optional_fixes(hint: Any, arguments: tuple[Any, ...]) -> tuple[Fix | None, Fix | None]:
    inner = [argument for argument in arguments if argument is not type(None)]
    if len(inner) != 1 or len(arguments) != 2:
        message = f"A record field of type {hint!r} has no Avro form: only `X | None` is known."
        raise TypeError(message)
    encode, decode = _fixes_for(inner[0])
    return _none_safe(encode), _none_safe(decode)


def _none_safe(fix: Fix | None) -> Fix | None:
    return None if fix is None else lambda value: None if value is None else fix(value)
