"""The checksums of a snapshot's chunks, if its manifest has no room for them: four bytes of chunk size, then 32 bytes per chunk."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from echo_bus.blobs.transfer import CHUNK_BYTES, cut
from echo_bus.errors import BlobCorrupt
from echo_schemas.records import ChunkRef

_SIZE = struct.Struct(">I")
_DIGEST_BYTES = 32


def list_chunks(pieces: Iterable[bytes | memoryview]) -> bytes:
    """The list of the chunks into which `pieces` are cut, in order."""
    return _SIZE.pack(CHUNK_BYTES) + b"".join(hashlib.sha256(chunk).digest() for chunk in cut(pieces, CHUNK_BYTES))


def read_chunk_list(data: bytes, num_bytes: int) -> tuple[ChunkRef, ...]:
    """The chunks of a snapshot of `num_bytes`; their offsets are not known. Raises BlobCorrupt."""
    size = _SIZE.unpack_from(data)[0] if len(data) >= _SIZE.size else 0
    num_chunks = -(-num_bytes // size) if size else 0
    if not num_chunks or len(data) != _SIZE.size + num_chunks * _DIGEST_BYTES:
        raise BlobCorrupt(f"A list of chunks of {len(data)} bytes does not describe a snapshot of {num_bytes}.")
    digests = (data[start : start + _DIGEST_BYTES].hex() for start in range(_SIZE.size, len(data), _DIGEST_BYTES))
    return tuple(
        ChunkRef(index=index, offset=0, num_bytes=min(size, num_bytes - index * size), sha256=digest)
        for index, digest in enumerate(digests)
    )
