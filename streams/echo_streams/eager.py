"""A coroutine run as far as it goes without waiting: what never waits needs no task.

Threads: everything happens on the loop, and in the task, that calls `start`.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """The coroutine has returned `value` without waiting."""

    value: T


def start(coroutine: Coroutine[Any, Any, T]) -> Ended[T] | Coroutine[Any, Any, T]:
    """Run `coroutine` until it ends or waits. In the second case the rest of it comes back, to be awaited or made a task.

    Raises what the coroutine raises before its first wait. It must not ask for the current task until then: that is the caller's.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as ended:
        return Ended(ended.value)
    return _rest(coroutine, waits_for)


async def _rest(started: Coroutine[Any, Any, T], waits_for: Any) -> T:
    # A generator that can be awaited is no Awaitable to isinstance, which is what asyncio and mode ask.
    rest: T = await _steps(started, waits_for)
    return rest


@types.coroutine
def _steps(started: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    while True:
        try:
            step, given = started.send, (yield waits_for)
        except BaseException as exc:  # a cancellation too: it is thrown into whoever waits
            step, given = started.throw, exc
        try:
            waits_for = step(given)
        except StopIteration as ended:
            value: T = ended.value
            return value
