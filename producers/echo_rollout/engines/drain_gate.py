"""Admits generations, and closes until none is under way: for weights that replace what runs. Used on one asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DrainGate:
    """`admitted` blocks while an install is inside `drained`; `drained` blocks until every generation has left `admitted`."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """One generation."""
        while not self._open.is_set():
            await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            # No await here, so that a cancelled generation leaves too.
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Nothing runs and nothing is admitted inside. One at a time."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()
