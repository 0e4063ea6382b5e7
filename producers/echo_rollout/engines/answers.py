"""From an engine's thread back to the asyncio loop that asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


def answer_all(loop: asyncio.AbstractEventLoop | None, answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Resolve futures of `loop` with results or exceptions, waking it once: it takes the interpreter from the engine's thread.

    A future that is done, and a loop that is gone, want nothing. Called from any thread.
    """

    def resolve() -> None:
        for future, result in answers:
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    if answers and loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(resolve)
