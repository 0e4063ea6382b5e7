"""The protocol between two peers: one connection, one request, then chunks.

    server → client   magic, 32 random bytes a
    client → server   length, request (JSON), 32 random bytes b, HMAC(secret, "ask" a b request)
    server → client   HMAC(secret, "give" a b request), then frames: kind, chunk's index, length, bytes

Neither side sends the secret, and a proof is valid on its own connection alone. A server that gets a wrong proof hangs up without a reply.
Frames: CHUNK; WAITING (the server waits for the chunk too), about every `WAIT_S`; GONE (it does not have the snapshot any more).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import ssl
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from echo_rollout.weights.peers.line import Line
from echo_schemas.errors import EchoError

WAIT_S = 0.5
_MAGIC = b"echoswarm peer 1"
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_FRAME = struct.Struct(">BII")
# A request names ranges of indices; this is enough for some thousand gaps.
_MAX_REQUEST_BYTES = 65_536
_OPEN = Line()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How peers connect. `advertise`: the host in the worker's status. `tls`: contexts of the server and of the client. Below `least_bytes`
    or `least_workers` a snapshot comes from the truth. `down` and `up`: limits of bytes per second.
    """

    worker_id: str
    run_id: str
    secret: bytes
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = "127.0.0.1"
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | tuple[None, None] = (None, None)
    least_bytes: int = 0
    least_workers: int = 2
    down: Line = field(default_factory=Line)
    up: Line = field(default_factory=Line)


class Why(StrEnum):
    """Why a peer is asked no more."""

    UNREACHABLE = "unreachable"
    BROKE_OFF = "broke_off"
    SLOW = "slow"
    REFUSED = "refused"
    GONE = "gone"
    WRONG = "wrong"
    WAITED = "waited"


class PeerFault(EchoError):
    """A peer did not send what it was asked for."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why


class Kind(IntEnum):
    CHUNK = 1
    WAITING = 2
    GONE = 3


@dataclass(frozen=True, slots=True)
class Request:
    """Chunks of one snapshot, as ranges of indices (first, behind the last), in the order in which they are wanted."""

    run_id: str
    sha256: str
    ranges: tuple[tuple[int, int], ...]

    def indices(self) -> Iterator[int]:
        for first, end in self.ranges:
            yield from range(first, end)


def ranges_of(indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Rising indices as ranges: 1 2 3 7 8 is (1, 4) (7, 9)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return tuple(ranges)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, secret: bytes) -> None:
    """Send a request, as the client. Raises PeerFault unless the server knows the secret, OSError, IncompleteReadError."""
    challenge = await reader.readexactly(len(_MAGIC) + _NONCE_BYTES)
    if not challenge.startswith(_MAGIC):
        raise PeerFault(Why.WRONG, "it is no peer of this release")
    body = json.dumps([request.run_id, request.sha256, request.ranges]).encode()
    if len(body) > _MAX_REQUEST_BYTES:
        # The first gaps are enough for now; the client asks again for the rest.
        body = json.dumps([request.run_id, request.sha256, request.ranges[:1000]]).encode()
    said = challenge[len(_MAGIC) :] + os.urandom(_NONCE_BYTES) + body
    writer.write(_LENGTH.pack(len(body)) + body + said[_NONCE_BYTES : 2 * _NONCE_BYTES] + _mac(secret, b"ask", said))
    await writer.drain()
    try:
        proof = await reader.readexactly(_MAC_BYTES)
    except asyncio.IncompleteReadError as exc:
        raise PeerFault(Why.REFUSED, "it hung up on our secret") from exc
    if not hmac.compare_digest(proof, _mac(secret, b"give", said)):
        raise PeerFault(Why.REFUSED, "it does not know the secret of this run")


async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Request:
    """Receive a request, as the server. Raises PeerFault unless the client knows the secret, OSError, IncompleteReadError."""
    challenge = os.urandom(_NONCE_BYTES)
    writer.write(_MAGIC + challenge)
    await writer.drain()
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MAX_REQUEST_BYTES:
        raise PeerFault(Why.WRONG, f"its request has {length} bytes")
    body = await reader.readexactly(length)
    said = challenge + await reader.readexactly(_NONCE_BYTES) + body
    if not hmac.compare_digest(await reader.readexactly(_MAC_BYTES), _mac(secret, b"ask", said)):
        raise PeerFault(Why.REFUSED, "it does not know the secret of this run")
    request = _parsed(body)
    writer.write(_mac(secret, b"give", said))
    await writer.drain()
    return request


async def send(writer: asyncio.StreamWriter, kind: Kind, index: int = 0, data: bytes = b"", line: Line = _OPEN) -> None:
    """Send one frame, as fast as `line` allows."""
    writer.write(_FRAME.pack(kind, index, len(data)))
    for start in range(0, len(data), line.piece_bytes):
        piece = memoryview(data)[start : start + line.piece_bytes]
        await line.pass_on(len(piece))
        writer.write(piece)
        await writer.drain()
    await writer.drain()


async def receive_data(reader: asyncio.StreamReader, num_bytes: int, line: Line) -> bytes:
    """The bytes after a frame's header, as fast as `line` allows. Raises IncompleteReadError."""
    parts = []
    for start in range(0, num_bytes, line.piece_bytes):
        parts.append(await reader.readexactly(min(line.piece_bytes, num_bytes - start)))
        await line.pass_on(len(parts[-1]))
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def receive(reader: asyncio.StreamReader) -> tuple[Kind, int, int]:
    """Kind, index and length of the next frame. Raises PeerFault for what is none, IncompleteReadError."""
    kind, index, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    try:
        return Kind(kind), index, length
    except ValueError:
        raise PeerFault(Why.WRONG, f"it sent a frame of the unknown kind {kind}") from None


def _mac(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, hashlib.sha256)


def _parsed(body: bytes) -> Request:
    try:
        run_id, sha256, ranges = json.loads(body)
        return Request(str(run_id), str(sha256), tuple((int(first), int(end)) for first, end in ranges))
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise PeerFault(Why.WRONG, "its request is none") from exc
