"""A coroutine begun by hand and ended by whoever awaits the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from echo_streams.eager import Ended, start


async def ends(value: int) -> int:
    return value


async def raises() -> int:
    raise ValueError("at once")


async def waits(event: asyncio.Event, trace: list[str]) -> int:
    trace.append("begun")
    try:
        await event.wait()
        await asyncio.sleep(0)
        trace.append("ended")
    except asyncio.CancelledError:
        trace.append("cancelled")
        raise
    return 7


def test_what_does_not_wait_has_ended() -> None:
    assert start(ends(3)) == Ended(3)


def test_what_raises_at_once_raises_here() -> None:
    with pytest.raises(ValueError, match="at once"):
        start(raises())


@pytest.mark.parametrize("as_task", [True, False])
def test_the_rest_of_what_waits_can_be_awaited_or_made_a_task(as_task: bool) -> None:
    async def run() -> list[str]:
        event, trace = asyncio.Event(), list[str]()
        rest = start(waits(event, trace))
        assert isinstance(rest, Awaitable)
        assert trace == ["begun"]
        asyncio.get_running_loop().call_soon(event.set)
        assert await (asyncio.create_task(rest) if as_task else rest) == 7
        return trace

    assert asyncio.run(run()) == ["begun", "ended"]


def test_a_cancellation_reaches_the_coroutine() -> None:
    async def run() -> list[str]:
        trace: list[str] = []
        rest = start(waits(asyncio.Event(), trace))
        assert not isinstance(rest, Ended)
        task = asyncio.create_task(rest)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return trace

    assert asyncio.run(run()) == ["begun", "cancelled"]


def test_an_error_after_a_wait_reaches_whoever_awaits() -> None:
    async def later() -> int:
        await asyncio.sleep(0)
        raise ValueError("later")

    async def run() -> None:
        rest = start(later())
        assert not isinstance(rest, Ended)
        with pytest.raises(ValueError, match="later"):
            await rest

    asyncio.run(run())
