"""Arrow arrays of what several tables of an export have: where a message lies, where a trajectory lies, numbers for each token. Imports
pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers
from echo_schemas.records import Coordinates

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
    """Where messages lie, and what their headers say."""
    headers = [raw_headers(raw) for raw in messages]
    ends = np.concatenate([[0], np.cumsum([len(each) for each in headers], dtype=np.int32)]).astype(np.int32)
    pairs = [pair for each in headers for pair in each]
    keys = [raw.key() for raw in messages]
    named = pa.StructArray.from_arrays(
        [pa.array([name for name, _ in pairs], pa.string()), _texts([value for _, value in pairs])],
        fields=list(KAFKA.field("headers").type.value_type),
    )
    arrays = [
        pa.array([raw.topic() for raw in messages], pa.string()),
        pa.array([raw.partition() for raw in messages], pa.int32()),
        pa.array([raw.offset() for raw in messages], pa.int64()),
        pa.array([raw.timestamp()[1] for raw in messages], pa.int64()),
        pa.array([None if key is None else key.decode(errors="replace") for key in keys], pa.string()),
        pa.ListArray.from_arrays(ends, named),
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(KAFKA))


def places_array(where: Sequence[Coordinates]) -> Any:
    arrays = [pa.array([each.partition for each in where], pa.int32()), pa.array([each.offset for each in where], pa.int64())]
    return pa.StructArray.from_arrays(arrays, fields=list(PLACE))


def lists_array(arrays: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """A list column from numpy arrays, without a Python object for each number."""
    sizes = [0 if each is None else len(each) for each in arrays]
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int32)]).astype(np.int32)
    there = [each for each in arrays if each is not None]
    values = np.concatenate(there) if there else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(ends, values.astype(dtype, copy=False), mask=pa.array([each is None for each in arrays], pa.bool_()))


def _texts(values: Sequence[bytes | None]) -> Any:
    """Text as it is, if all of it is UTF-8; else with a mark where it is not."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if value is None else value.decode(errors="replace") for value in values], pa.string())
