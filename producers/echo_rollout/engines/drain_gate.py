"""Admits generations, and closes until none is under way: for weights that replace what runs. Used on one asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DrainGate:
    """`admitted` blocks while somebody is inside `drained`; `drained` blocks until everybody has left `admitted`."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_inside = 0
        self._is_open = True

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """One generation."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Nothing runs and nothing is admitted inside. One at a time."""
        self._is_open = False
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_inside == 0)
            yield
        finally:
            self._is_open = True
            async with self._changed:
                self._changed.notify_all()
