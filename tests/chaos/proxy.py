"""TCP proxies in front of the brokers, to be slowed down, silenced, cut half open and reset while clients hold connections.

    client ──▶ proxy (one a broker; what the broker advertises) ──▶ broker

Threads: one thread of a `ProxyBank` runs an event loop with all its proxies; the methods may be called from any other thread and return
once the change is in force.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

_CHUNK = 65_536
_QUEUED_CHUNKS = 256
_ANSWER_S = 60.0
# Closing with a linger time of zero sends a reset instead of an orderly end.
_RESET = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Link:
    """One client's connection through a proxy. `is_dead`: it stays open, and nothing passes for ever."""

    client: asyncio.StreamWriter
    broker: asyncio.StreamWriter
    is_dead: bool = False

    def close(self, *, reset: bool) -> None:
        for writer in (self.client, self.broker):
            if reset:
                with suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


@dataclass(eq=False)
class _Proxy:
    """The way to one broker."""

    host: str
    port: int
    target: tuple[str, int]
    latency_s: float = 0.0
    refuses: bool = False
    passes: asyncio.Event = field(default_factory=asyncio.Event)
    links: set[_Link] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    server: asyncio.Server | None = None

    async def open(self) -> None:
        self.passes.set()
        self.server = await asyncio.start_server(self._accept, self.host, self.port)

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for link in list(self.links):
            link.close(reset=False)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        # A connection that is cancelled has ended: asyncio's own callback would call that an exception nobody expects.
        with suppress(asyncio.CancelledError):
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.passes.wait()
            to_reader, to_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, to_writer)
        if self.refuses:
            link.close(reset=True)
            return
        self.links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, to_writer, link))
                group.create_task(self._pump(to_reader, writer, link))
        except* OSError:
            pass
        finally:
            link.close(reset=False)
            self.links.discard(link)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        """One direction. Latency delays every byte by as much and does not narrow the way."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)

        async def take() -> None:
            while chunk := await reader.read(_CHUNK):
                await waiting.put((loop.time() + self.latency_s, chunk))
            await waiting.put((0.0, b""))

        async def give() -> None:
            while True:
                due_s, chunk = await waiting.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await self.passes.wait()
                if link.is_dead:
                    continue
                if not chunk:
                    raise ConnectionResetError
                writer.write(chunk)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())


class ProxyBank:
    """A proxy for each broker. Brokers are counted from 0."""

    def __init__(self, host: str, ports: Sequence[int], targets: Sequence[tuple[str, int]]) -> None:
        """Listens on `host`, on one of `ports` for each of `targets`."""
        self.addresses = ",".join(f"{host}:{port}" for port in ports)
        self._proxies = [_Proxy(host, port, target) for port, target in zip(ports, targets, strict=True)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        for proxy in self._proxies:
            self._do(proxy.open)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for proxy in self._proxies:
            self._do(proxy.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)
        self._loop.close()

    def num_links(self, broker: int) -> int:
        """Connections that pass through to a broker now."""
        return len(self._proxies[broker].links)

    def slow(self, latency_s: float, brokers: Sequence[int]) -> None:
        """Every byte to and from these brokers takes so much longer."""

        async def change() -> None:
            for broker in brokers:
                self._proxies[broker].latency_s = latency_s

        self._do(change)

    def silence(self, broker: int) -> None:
        """Nothing passes and nobody is told, as where packets are lost. `heal` lets through what waits, as TCP sends again."""

        async def change() -> None:
            self._proxies[broker].passes.clear()

        self._do(change)

    def cut_half_open(self, broker: int) -> None:
        """The connections of this moment stay open, and nothing passes through them any more; new ones work."""

        async def change() -> None:
            for link in self._proxies[broker].links:
                link.is_dead = True

        self._do(change)

    def reset(self, broker: int, *, refuse: bool) -> None:
        """All connections get a reset; with `refuse` new ones do too, until `heal`."""

        async def change() -> None:
            proxy = self._proxies[broker]
            proxy.refuses = refuse
            for link in list(proxy.links):
                link.close(reset=True)

        self._do(change)

    def heal(self) -> None:
        """Everything passes at once again; connections that were cut half open stay as they are."""

        async def change() -> None:
            for proxy in self._proxies:
                proxy.latency_s, proxy.refuses = 0.0, False
                proxy.passes.set()

        self._do(change)

    def _do(self, change: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await change()

        future: Future[T] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future.result(_ANSWER_S)
