"""A record whose last field is bytes is encoded without fastavro's copies: the bytes on the wire are the same."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pytest

from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import Chunk
from echo_schemas.schemas import newest

_PREFIX_BYTES = 5


def chunk(data: Any) -> Chunk:
    return Chunk(run_id="demo", blob="v/1/abc", index=3, num_chunks=7, sha256="0" * 64, data=data)


# The lengths around which Avro's coding of a length takes one byte more.
@pytest.mark.parametrize("size", [0, 1, 63, 64, 8_191, 8_192, 899_000, 1_048_576])
def test_a_chunk_is_what_avro_says(size: int) -> None:
    record = chunk(bytes(number % 251 for number in range(size)))
    expected = io.BytesIO()
    fields = {name: getattr(record, name) for name in ("run_id", "blob", "index", "num_chunks", "sha256", "data")}
    fastavro.schemaless_writer(expected, newest("chunk").parsed, fields)
    encoded = lock_file_codec().encode(record)
    assert encoded[_PREFIX_BYTES:] == expected.getvalue()
    assert lock_file_codec().decode(encoded) == record


def test_a_view_is_written_like_the_bytes_it_shows() -> None:
    data = b"0123456789" * 1000
    assert lock_file_codec().encode(chunk(memoryview(data)[10:500])) == lock_file_codec().encode(chunk(data[10:500]))


@pytest.mark.parametrize("data", [None, "text", 7])
def test_what_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(InvalidRecord, match="Chunk"):
        lock_file_codec().encode(chunk(data))
