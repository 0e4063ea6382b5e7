"""From other threads to the asyncio loop: an answer that is awaited, and the error that ends the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Awaited(Generic[_T]):
    """Made on the loop; `settle` or `fail` it once, from any thread; await it. Once its awaiter is cancelled, both do nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[_T] = self._loop.create_future()

    @property
    def is_given_up(self) -> bool:
        """Whether its awaiter was cancelled. From any thread."""
        return self._future.cancelled()

    def settle(self, value: _T) -> None:
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


class Failing:
    """The error that ends the worker early; the first one counts. Made on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] = loop.create_future()

    @property
    def is_there(self) -> bool:
        """Whether there was an error."""
        return self._future.done()

    def note(self, error: BaseException) -> None:
        """End the worker with `error`. From any thread."""

        def settle() -> None:
            if not self._future.done():
                self._future.set_exception(error)
                # Retrieved here, so that asyncio does not report an error that is never raised.
                self._future.exception()

        self.on_loop(settle)

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop; nothing happens once the loop is closed. From any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    async def or_done(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Wait for `coroutine`, or raise the error that comes first."""
        task: asyncio.Task[Any] = self._loop.create_task(coroutine)
        await asyncio.wait({task, self._future}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.raise_it()
        await task

    def raise_it(self) -> None:
        """Raise the error, if there is one."""
        if self._future.done():
            self._future.result()
