"""Generations under way on one asyncio loop: a caller that is cancelled takes its own along, and closing the engine ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from echo_rollout.engines.engine import EngineError

ResultT = TypeVar("ResultT")

_CLOSED = "The engine was closed."


class UnderWay:
    """What an engine generates at the moment. `is_closed`: it generates no more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_closed = False

    def check_open(self) -> None:
        """Raise EngineError once it is closed."""
        if self.is_closed:
            raise EngineError(_CLOSED)

    async def run(self, generation: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `generation` returns. Raises EngineError if the engine is closed meanwhile."""
        task = asyncio.ensure_future(generation)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self.is_closed:
                raise EngineError(_CLOSED) from None
            raise
        finally:
            self._tasks.discard(task)

    def close(self) -> bool:
        """End all of them. False if it was closed already."""
        was_open, self.is_closed = not self.is_closed, True
        for task in list(self._tasks):
            task.cancel()
        return was_open
