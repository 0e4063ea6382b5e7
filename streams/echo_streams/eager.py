"""Runs a coroutine up to its first wait: one that never waits needs no task.

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
    """Run `coroutine` until it ends or waits. If it waits, returns the rest of it, to be awaited or made a task.

    Raises the coroutine's errors before its first wait. Until then it must not ask for the current task, which is the caller's.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as ended:
        return Ended(ended.value)
    return _rest(coroutine, waits_for)


async def _rest(started: Coroutine[Any, Any, T], waits_for: Any) -> T:
    # A coroutine around the generator: asyncio and mode test with isinstance for Awaitable, which a generator is not.
    rest: T = await _steps(started, waits_for)
    return rest


@types.coroutine
def _steps(started: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    while True:
        try:
            step, given = started.send, (yield waits_for)
        except BaseException as exc:  # a cancellation, too, is thrown into the waiting coroutine
            step, given = started.throw, exc
        try:
            waits_for = step(given)
        except StopIteration as ended:
            value: T = ended.value
            return value
