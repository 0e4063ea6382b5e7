"""The difference between two snapshots of the same layout: the new values and their positions, compressed.

Bytes are compared in words of two, because bfloat16 has two bytes: at the learning rates of reinforcement learning a step changes few of
such weights (PULSE, arXiv 2602.03839: 1 %). A delta holds new values, not differences, so that no rounding errors add up.

    for each block of both snapshots    length, zstd(number of changes | gaps between them | new words)

Gaps and words are stored as planes: all first bytes, then all second bytes, which compresses better. Deltas of successive versions are
combined by applying one to the result of the other. The caller must verify the result, because a delta has no checksum. Imports cramjam
when used.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from echo_bus.errors import BlobCorrupt

Words = npt.NDArray[np.uint16]

BLOCK_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_GAP = np.dtype("<u4")
_WORD = np.dtype("<u2")
_LEVEL = 3


def diff(old: Iterable[bytes], new: Iterable[bytes], *, most_bytes: int) -> bytes | None:
    """The delta from `old` to `new`, both in pieces of any size; None above `most_bytes`, or if their sizes differ."""
    import cramjam

    parts: list[bytes] = []
    num_bytes = 0
    before, after = blocks(old), blocks(new)
    for block in before:
        other = next(after, b"")
        if len(other) != len(block):
            return None
        packed = bytes(cramjam.zstd.compress(_changes(_words(block), _words(other)), level=_LEVEL))
        parts.append(_LENGTH.pack(len(packed)) + packed)
        num_bytes += len(parts[-1])
        if num_bytes > most_bytes:
            return None
    return None if next(after, b"") else b"".join(parts)


def patch(old: Iterable[bytes], delta: bytes) -> Generator[bytes, None, None]:
    """The new bytes, block by block. Raises BlobCorrupt for a delta that does not fit `old`."""
    import cramjam

    place = 0
    for block in blocks(old):
        (size,) = _LENGTH.unpack_from(delta, place) if place + _LENGTH.size <= len(delta) else (len(delta),)
        packed = delta[place + _LENGTH.size : place + _LENGTH.size + size]
        place += _LENGTH.size + size
        try:
            changes = bytes(cramjam.zstd.decompress(packed))
        except cramjam.DecompressionError as exc:
            raise BlobCorrupt(f"A delta cannot be unpacked: {exc}.") from exc
        yield _changed(_words(block), changes).tobytes()[: len(block)]
    if place != len(delta):
        raise BlobCorrupt("A delta is of a snapshot of another size.")


def blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of BLOCK_BYTES, the last one shorter."""
    gathered = bytearray()
    for piece in pieces:
        gathered += piece
        while len(gathered) >= BLOCK_BYTES:
            yield bytes(gathered[:BLOCK_BYTES])
            del gathered[:BLOCK_BYTES]
    if gathered:
        yield bytes(gathered)


def _words(block: bytes) -> Words:
    """An odd last byte is padded with zero."""
    return np.frombuffer(block + b"\0" * (len(block) % 2), _WORD)


def _changes(old: Words, new: Words) -> bytes:
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=0).astype(_GAP)
    return _LENGTH.pack(len(places)) + _planes(gaps) + _planes(new[places])


def _changed(old: Words, changes: bytes) -> Words:
    count = _LENGTH.unpack_from(changes)[0] if len(changes) >= _LENGTH.size else -1
    if len(changes) != _LENGTH.size + count * (_GAP.itemsize + _WORD.itemsize):
        raise BlobCorrupt("A block of a delta has another size than it says.")
    values_at = _LENGTH.size + count * _GAP.itemsize
    places = np.cumsum(_from_planes(changes[_LENGTH.size : values_at], _GAP), dtype=np.int64)
    if count and places[-1] >= len(old):
        raise BlobCorrupt("A delta changes what is beyond the end of a block.")
    new = old.copy()
    new[places] = _from_planes(changes[values_at:], _WORD)
    return new


def _planes(values: npt.NDArray[np.unsignedinteger]) -> bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: np.dtype[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)
