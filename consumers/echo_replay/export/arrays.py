"""Arrow arrays for the columns of an export: records' attributes, numbers of each token, places of messages. Imports pyarrow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers

KAFKA = pa.struct(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("time_ms", pa.int64()),
        ("key", pa.string()),
        ("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))),
    ]
)
PLACE = pa.struct([("partition", pa.int32()), ("offset", pa.int64())])


def messages_array(messages: Sequence[RawMessage]) -> Any:
    """Places, keys and headers of messages."""
    headers = [raw_headers(raw) for raw in messages]
    ends = np.cumsum([0, *map(len, headers)], dtype=np.int32)
    names, values = zip(*itertools.chain.from_iterable(headers), strict=True) if ends[-1] else ((), ())
    named = pa.StructArray.from_arrays([pa.array(names, pa.string()), _texts(values)], fields=list(KAFKA.field("headers").type.value_type))
    arrays = [
        pa.array([raw.topic() for raw in messages], pa.string()),
        pa.array([raw.partition() for raw in messages], pa.int32()),
        pa.array([raw.offset() for raw in messages], pa.int64()),
        pa.array([raw.timestamp()[1] for raw in messages], pa.int64()),
        _texts([raw.key() for raw in messages]),
        pa.ListArray.from_arrays(ends, named),
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(KAFKA))


def attribute_array(objects: Sequence[object | None], name: str, kind: Any) -> Any:
    """An attribute of each object as an array of type `kind`; null for an object that is None. An inner record becomes a struct of its
    attributes."""
    try:
        values = list(map(attrgetter(name), objects))
    except AttributeError:  # one of them is None
        values = [getattr(each, name, None) for each in objects]
    return _array(values, kind)


def numbers_array(packed: Sequence[bytes | None], kind: Any) -> Any:
    """A list column of the little-endian numbers of each entry: copied once, without a Python object for each number."""
    ends = np.cumsum([0, *(0 if each is None else len(each) for each in packed)], dtype=np.int64) // (kind.bit_width // 8)
    data = pa.py_buffer(b"".join([each for each in packed if each is not None]))
    values = pa.Array.from_buffers(kind, int(ends[-1]), [None, data])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, mask=_missing(packed))


def _array(values: Sequence[Any], kind: Any) -> Any:
    # Column by column, also inside structs: a dictionary for each struct would cost ten times as much.
    if pa.types.is_struct(kind):
        arrays = [attribute_array(values, field.name, field.type) for field in kind]
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=_missing(values))
    if pa.types.is_map(kind):
        return pa.array([None if each is None else list(each.items()) for each in values], kind)
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        ends = np.cumsum([0, *(0 if each is None else len(each) for each in values)], dtype=np.int32)
        flat = [item for each in values if each is not None for item in each]
        return pa.ListArray.from_arrays(pa.array(ends), _array(flat, kind.value_type), type=kind, mask=_missing(values))
    return pa.array(values, kind)


def _missing(values: Sequence[object | None]) -> Any:
    missing = [each is None for each in values]
    return pa.array(missing, pa.bool_()) if any(missing) else None


def _texts(values: Sequence[bytes | None]) -> Any:
    """The values as text; bytes that are no UTF-8 become replacement characters."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if value is None else value.decode(errors="replace") for value in values], pa.string())
