"""Numbers as Avro writes them: every length, and what is no number."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.varints import READ_CODED, READ_NUMBER, READ_SCOPE, coded

_EDGES = sorted({sign * ((1 << bits) + more) for bits in range(63) for more in (-1, 0, 1) for sign in (1, -1)})
_ENDS = (0, (1 << 63) - 1, -(1 << 63))


def _read(data: bytes, at: int = 0, lines: tuple[str, ...] = READ_NUMBER) -> tuple[int, int]:
    scope: dict[str, Any] = dict(READ_SCOPE)
    exec("\n".join(["def read(data, at):", *(f"    {line}" for line in lines), "    return n, at"]), scope)
    found: tuple[int, int] = scope["read"](data, at)
    return found


def _by_fastavro(value: int) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, "long", value)
    return buffer.getvalue()


@pytest.mark.parametrize("value", [*_EDGES, *_ENDS, 1_763_700_000_000])
def test_a_number_of_every_length_is_as_fastavro_writes_it_and_comes_back(value: int) -> None:
    data = _by_fastavro(value)
    assert coded(value) == data
    # At the end of the bytes, and before others.
    assert _read(b"\x7f\xff" + data, 2) == (value, 2 + len(data))
    assert _read(data + b"\x80" * 10) == (value, len(data))


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=12))
def test_what_follows_a_number_does_not_change_it(value: int, behind: bytes) -> None:
    data = coded(value)
    assert _read(data + behind) == (value, len(data))
    assert _read(data + behind, lines=READ_CODED)[0] == (value << 1) ^ (value >> 63)


@pytest.mark.parametrize("length", range(1, 11))
def test_a_number_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(IndexError):
        _read(b"\x80" * length if length < 10 else b"")


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        _read(b"\xff" * 20)
    with pytest.raises(ValueError, match="64 bits"):
        _read(b"\xff" * 9 + b"\x02")
    with pytest.raises(OverflowError):
        coded(1 << 63)
