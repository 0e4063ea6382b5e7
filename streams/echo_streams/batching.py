"""From single arrivals to batches: full ones at once, smaller ones when their first member has waited long enough.

    put ─▶ inbox (bounded) ─▶ run: batches ─▶ handle, several at once, bounded by what is in flight

Threads: one event loop. `put` waits while the inbox is full, `run` while it is empty or too much is in flight. `handle` may wait for long:
other batches run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from echo_core.bottleneck import Place, Use
from echo_runtime.places import PlaceTimes

T = TypeVar("T")

MAX_BATCH = 256
"""Trajectories scored and delivered together: large enough that a burst of 512 waits for two round trips, small enough to start early."""
MAX_IN_FLIGHT = 4 * MAX_BATCH
"""Trajectories in batches at once, so that a batch that waits (for the broker, for a slow judge) does not hold up the next."""
MAX_WAITING = 2 * MAX_BATCH
"""Trajectories in the inbox: one batch that is formed and one that arrives meanwhile."""
# Arrivals come one by one out of one fetch, and each batch costs the broker a request.
LINGER_S = 0.003
# While other batches are scored or delivered, a longer wait for more members costs nothing: requests go one after another.
LINGER_BUSY_S = 0.03


class Batcher(Generic[T]):
    """Feeds `handle` with batches until cancelled. `failure` keeps the first failure of a batch; the owner then ends the process."""

    def __init__(self, handle: Callable[[list[T]], Coroutine[Any, Any, None]], *, places: PlaceTimes) -> None:
        self._handle = handle
        self._places = places
        self._inbox: deque[T] = deque()
        self._moved = asyncio.Event()
        self._room = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self.num_in_flight = 0
        """Members of the batches under way."""
        self.failure: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Arrivals that are in no batch yet."""
        return len(self._inbox)

    async def put(self, item: T) -> None:
        """Add an arrival; waits while the inbox is full."""
        self._inbox.append(item)
        if len(self._inbox) == 1 or self._is_full():
            self._moved.set()
        while len(self._inbox) >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()

    async def run(self) -> None:
        """Form batches until cancelled, which cancels the batches under way too."""
        try:
            while True:
                if not self._inbox:
                    with self._places.spent(Place.REWARD, Use.EMPTY):
                        await self._until(lambda: bool(self._inbox))
                await self._until(self._is_full, LINGER_S)
                await self._until(lambda: self.num_in_flight == 0 or self._is_full(), LINGER_BUSY_S)
                await self._until(lambda: self.num_in_flight + min(MAX_BATCH, len(self._inbox)) <= MAX_IN_FLIGHT)
                self._start([self._inbox.popleft() for _ in range(min(MAX_BATCH, len(self._inbox)))])
                # Let the batch start now, also while the inbox never runs empty.
                await asyncio.sleep(0)
        finally:
            for task in self._running:
                task.cancel()

    async def drained(self) -> None:
        """Wait until nothing waits and nothing is in flight, or a batch has failed."""
        await self._until(lambda: self.failure is not None or (not self._inbox and self.num_in_flight == 0))

    def _start(self, batch: list[T]) -> None:
        self._room.set()
        self.num_in_flight += len(batch)
        task = asyncio.create_task(self._handle(batch), name="reward batch")
        self._running.add(task)
        task.add_done_callback(functools.partial(self._end, len(batch)))

    def _end(self, size: int, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.num_in_flight -= size
        self._moved.set()
        if not task.cancelled() and (failure := task.exception()) is not None and self.failure is None:
            self.failure = failure

    def _is_full(self) -> bool:
        return len(self._inbox) >= MAX_BATCH

    async def _until(self, condition: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait for `condition`, which arrivals and ends of batches may change; at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._moved.clear()
                    await self._moved.wait()
