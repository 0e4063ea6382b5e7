"""What another thread will say, awaited on the asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Awaited(Generic[_T]):
    """Made on the loop; `settle` or `fail` it once, from any thread; await it. Nothing happens where nobody waits any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[_T] = self._loop.create_future()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits any more. From any thread."""
        return self._future.cancelled()

    def settle(self, value: _T) -> None:
        """Give the answer."""
        self._on_loop(lambda: self._future.set_result(value))

    def fail(self, error: BaseException) -> None:
        """Raise `error` where it is awaited."""
        self._on_loop(lambda: self._future.set_exception(error))

    def __await__(self) -> Generator[Any, None, _T]:
        return self._future.__await__()

    def _on_loop(self, settle: Any) -> None:
        # The loop may be closed: the worker has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._future.done() or settle())
