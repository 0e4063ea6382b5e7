"""Between a record dataclass and the plain dictionary that fastavro reads and writes, derived once per class from its annotations."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

Fix = Callable[[Any], Any]
_PLAIN = (str, bytes, int, float, bool)


class Converter:
    """Converts one dataclass. Fields that Avro already represents (numbers, text, bytes) are copied; the others have a fix each way."""

    __slots__ = ("_cls", "_decode", "_encode", "_get", "_names")

    def __init__(self, cls: type[Any]) -> None:
        hints = typing.get_type_hints(cls)
        names = tuple(field.name for field in dataclasses.fields(cls))
        fixes = {name: _fixes_for(hints[name]) for name in names}
        self._cls = cls
        self._names = names
        # attrgetter of one name returns the value itself, of several a tuple.
        self._get: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
        )
        self._encode = tuple((name, fix) for name, (fix, _) in fixes.items() if fix is not None)
        self._decode = tuple((name, fix) for name, (_, fix) in fixes.items() if fix is not None)

    def to_plain(self, value: Any) -> dict[str, Any]:
        """The dictionary that fastavro writes."""
        plain = dict(zip(self._names, self._get(value), strict=True))
        for name, fix in self._encode:
            plain[name] = fix(plain[name])
        return plain

    def from_plain(self, plain: dict[str, Any]) -> Any:
        """The record of a dictionary that fastavro read; `plain` is used up."""
        for name, fix in self._decode:
            plain[name] = fix(plain[name])
        return self._cls(**plain)


@functools.cache
def converter_of(cls: type[Any]) -> Converter:
    """The one converter of a dataclass."""
    return Converter(cls)


def _fixes_for(hint: Any) -> tuple[Fix | None, Fix | None]:
    """(encode, decode) of a value of type `hint`; None where the value passes as it is."""
    if hint in _PLAIN:
        return None, None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional_fixes(hint, arguments)
    if origin is tuple:
        return _sequence_fixes(arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        # A copy on the way out, so that a read-only mapping can be written too.
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
        # A comprehension, not a generator: half the time for the one or two spans that most trajectories have.
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
