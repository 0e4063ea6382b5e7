"""Long number lists as bytes, and zero-copy numpy views of them.

An Avro array of 2,048 numbers is encoded a hundred times slower than the same numbers as `bytes`, so token ids are little-endian int32 and
log-probabilities little-endian float32. The views are read-only and share the record's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TOKEN_DTYPE: np.dtype[np.int32] = np.dtype("<i4")
LOGPROB_DTYPE: np.dtype[np.float32] = np.dtype("<f4")
OFFSET_DTYPE: np.dtype[np.int64] = np.dtype("<i8")
VALUE_DTYPE: np.dtype[np.float64] = np.dtype("<f8")
FLAG_DTYPE: np.dtype[np.uint8] = np.dtype("u1")
EXPERT_DTYPES: dict[float, np.dtype[Any]] = {1.0: np.dtype("u1"), 2.0: np.dtype("<u2")}
"""Type of an expert's number, by its size in bytes."""
TOKEN_BYTES = TOKEN_DTYPE.itemsize
LOGPROB_BYTES = LOGPROB_DTYPE.itemsize
MOST_SEQS = 1 << 20
"""Seqs that a bitmap covers: 128 KB, and a thousand times the seqs that are ever open in a run."""


def pack(values: Sequence[int] | Sequence[float] | npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """`values`, shape [n], as n little-endian numbers of `dtype`."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Token ids, shape [T], as 4·T bytes."""
    return pack(token_ids, TOKEN_DTYPE)


def pack_logprobs(logprobs: Sequence[float] | npt.NDArray[Any]) -> bytes:
    """Natural-log probabilities, shape [G], as 4·G bytes."""
    return pack(logprobs, LOGPROB_DTYPE)


def pack_seqs(base: int, seqs: Iterable[int]) -> bytes:
    """The `seqs` from `base` on as a bitmap: bit i, lowest first, is seq base + i. Seqs from base + `MOST_SEQS` on are left out. A thousand
    consecutive seqs take 125 bytes."""
    bits = np.fromiter((seq - base for seq in seqs if 0 <= seq - base < MOST_SEQS), np.int64)
    if not len(bits):
        return b""
    flags = np.zeros(int(bits.max()) + 1, np.uint8)
    flags[bits] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def seqs_of(base: int, packed: bytes) -> list[int]:
    """The seqs of a bitmap of `pack_seqs`, ascending; at most `MOST_SEQS`."""
    flags = np.unpackbits(np.frombuffer(packed[: MOST_SEQS // 8], np.uint8), bitorder="little")
    return [base + int(bit) for bit in np.flatnonzero(flags)]


def view_tokens(data: bytes) -> npt.NDArray[np.int32]:
    """Shape [T], read-only, no copy."""
    return np.frombuffer(data, TOKEN_DTYPE)


def view_logprobs(data: bytes) -> npt.NDArray[np.float32]:
    """Shape [G], read-only, no copy."""
    return np.frombuffer(data, LOGPROB_DTYPE)


def all_finite(data: bytes) -> bool:
    """True iff none of the little-endian float32 numbers in `data` is NaN or infinite (from 2^127 on, a number counts as infinite).

    Such a number has an exponent byte of 0x7f or 0xff. At a thousand entries two searches in every fourth byte are cheaper than any numpy
    reduction, and give no overflow warning."""
    exponents = data[LOGPROB_BYTES - 1 :: LOGPROB_BYTES]
    return b"\x7f" not in exponents and b"\xff" not in exponents
