"""Serves the chunks of the shelf to peers that know the run's secret. On the peers' loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.shelf import Shelf
from echo_rollout.weights.peers.wire import WAIT_S, Kind, PeerFault, PeerOptions, Request, hear, send
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
# A connection is closed after so long without a chunk for its client, or if the client takes so long to read one. It may ask again.
_IDLE_S = 60.0
# Far more than a plan needs: for each stripe one worker asks one other.
_MOST_CONNECTIONS = 256


class PeerServer:
    """`start` it, and `close` it."""

    def __init__(self, shelf: Shelf, options: PeerOptions, metrics: WorkerMetrics) -> None:
        self._shelf = shelf
        self._options = options
        self._metrics = metrics
        self._num_open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen; returns the port. Raises UserError where that is not possible."""
        host, port = self._options.host, self._options.port
        try:
            self._server = await asyncio.start_server(self._serve, host, port, ssl=self._options.tls[0])
        except OSError as exc:
            raise UserError(f"No peer can be served at {host}:{port}: {exc.strerror or exc}.", hint="Mend [weights] host or port.") from exc
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")
        self._num_open += 1
        try:
            if self._num_open > _MOST_CONNECTIONS:
                return
            async with asyncio.timeout(_HANDSHAKE_S):
                request = await hear(reader, writer, self._options.secret)
            await self._give(request, writer)
        except PeerFault as exc:
            logger.warning("The peer at %s is not served: %s.", name, exc)
        except asyncio.CancelledError:
            # `PeerSource.close`; asyncio's own callback would report a server's task that ends as cancelled.
            logger.debug("The connection to the peer at %s is ended", name)
        except (OSError, EOFError, TimeoutError) as exc:
            # The client hung up or does not answer; it asks again, or asks another worker.
            logger.debug("The connection to the peer at %s ended: %r", name, exc)
        finally:
            self._num_open -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _give(self, request: Request, writer: asyncio.StreamWriter) -> None:
        for index in request.indices():
            try:
                data = None if request.run_id != self._options.run_id else await self._chunk(request.sha256, index, writer)
            except OSError:
                data = None
            if data is None:
                await send(writer, Kind.GONE)
                return
            async with asyncio.timeout(_IDLE_S):
                await send(writer, Kind.CHUNK, index, data, self._options.up)
            self._metrics.peer_bytes.labels("sent").inc(len(data))

    async def _chunk(self, sha256: str, index: int, writer: asyncio.StreamWriter) -> bytes | None:
        """The chunk once it has arrived; until then WAITING frames are sent. None: the snapshot has no such chunk."""
        async with asyncio.timeout(_IDLE_S):
            while True:
                held = self._shelf.find(sha256)
                if held is not None and not 0 <= index < len(held.chunks):
                    return None
                try:
                    held = await asyncio.wait_for(self._shelf.wait_for(sha256, index), WAIT_S)
                except TimeoutError:
                    await send(writer, Kind.WAITING)
                    continue
                return await asyncio.to_thread(held.read, index)
