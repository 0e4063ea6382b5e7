"""Chunks of a snapshot from one peer. On the peers' loop."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncGenerator

from echo_rollout.weights.peers.wire import WAIT_S, Kind, PeerFault, PeerOptions, Request, Why, ask, receive, receive_data
from echo_schemas.records import ChunkRef

_CONNECT_S = 5.0
# A living server says at least every WAIT_S that it waits.
_SILENT_S = 8 * WAIT_S


class Pace:
    """Measures how long chunks take on this network, and derives how long one may take."""

    _REMEMBERED, _ENOUGH = 64, 4
    # A peer is slow above so many times the median time, and above `_LEAST_S`; above `_UNKNOWN_S` while there is no median.
    _FACTOR, _LEAST_S, _UNKNOWN_S = 8.0, 3.0, 30.0
    # Added to the time that a chunk needs to pass the workers before us: once, and for each of them.
    _WAIT_LEAST_S, _WAIT_HOP_S = 2.0, 0.3

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self._REMEMBERED)

    def took(self, seconds: float) -> None:
        """Note how long a chunk took from its first byte."""
        self._seconds.append(seconds)

    @property
    def chunk_s(self) -> float:
        """The longest that one chunk may take."""
        if len(self._seconds) < self._ENOUGH:
            return self._UNKNOWN_S
        return max(self._LEAST_S, self._FACTOR * statistics.median(self._seconds))

    def waiting_s(self, hops: int) -> float:
        """The longest that a parent may wait for its next chunk, which `hops` workers pass on before it reaches us."""
        median_s = statistics.median(self._seconds) if self._seconds else 0.0
        return self._WAIT_LEAST_S + hops * (self._WAIT_HOP_S + 2 * median_s)


async def chunks_from(
    address: str, request: Request, chunks: tuple[ChunkRef, ...], options: PeerOptions, *, pace: Pace, hops: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """The chunks of `request`, not verified, as they come. `hops`: the number of workers before us in the chain.

    Raises PeerFault for a peer that does not send all of them.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        host, port = split_address(address)
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=options.tls[1], limit=1 << 20)
            await ask(reader, writer, request, options.secret)
        for index in request.indices():
            size = await _next(reader, index, chunks[index].num_bytes, pace.waiting_s(hops))
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            try:
                async with asyncio.timeout(pace.chunk_s):
                    data = await receive_data(reader, size, options.down)
            except TimeoutError as exc:
                raise PeerFault(Why.SLOW, f"a chunk did not come within {pace.chunk_s:.1f} s") from exc
            pace.took(loop.time() - started_s)
            yield index, data
    except asyncio.IncompleteReadError as exc:
        raise PeerFault(Why.BROKE_OFF, "it broke off") from exc
    except (OSError, ValueError) as exc:
        why = Why.UNREACHABLE if writer is None else Why.BROKE_OFF
        raise PeerFault(why, f"it cannot be reached: {exc!r}") from exc
    finally:
        if writer is not None:
            writer.transport.abort()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not 0 < int(port) < 1 << 16:
        message = f"{address!r} is no host:port"
        raise ValueError(message)
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _next(reader: asyncio.StreamReader, index: int, num_bytes: int, waiting_s: float) -> int:
    """Read up to the first byte of the chunk `index`; returns its length. Raises PeerFault."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + waiting_s
    while True:
        try:
            async with asyncio.timeout(_SILENT_S):
                kind, sent, length = await receive(reader)
        except TimeoutError as exc:
            raise PeerFault(Why.SLOW, f"it said nothing for {_SILENT_S:g} s") from exc
        if kind is Kind.GONE:
            raise PeerFault(Why.GONE, "it does not have that snapshot")
        if kind is Kind.CHUNK:
            if (sent, length) != (index, num_bytes):
                raise PeerFault(Why.WRONG, f"it sent {length} bytes as chunk {sent} where chunk {index} has {num_bytes}")
            return length
        if loop.time() > until_s:
            raise PeerFault(Why.WAITED, f"it waits for chunk {index} itself, for more than {waiting_s:.1f} s")
