"""The gate before weights that replace what runs."""

from __future__ import annotations

import asyncio

import pytest

from echo_rollout.engines.serving import DrainGate


def test_draining_waits_for_those_inside_and_holds_the_others_back() -> None:
    async def run() -> None:
        gate, leave, order = DrainGate(), asyncio.Event(), []

        async def generation(name: str) -> None:
            async with gate.admitted():
                order.append(name)
                if name == "first":
                    await leave.wait()

        async def install() -> None:
            async with gate.drained():
                order.append("install")

        first = asyncio.ensure_future(generation("first"))
        await asyncio.sleep(0)
        installing = asyncio.ensure_future(install())
        await asyncio.sleep(0)
        second = asyncio.ensure_future(generation("second"))
        await asyncio.sleep(0)
        assert order == ["first"]
        leave.set()
        await asyncio.wait_for(asyncio.gather(first, installing, second), timeout=10)
        assert order == ["first", "install", "second"]

    asyncio.run(run())


def test_who_is_cancelled_or_fails_leaves_the_gate_as_it_was() -> None:
    async def run() -> None:
        gate = DrainGate()

        async def stuck() -> None:
            async with gate.admitted():
                await asyncio.Event().wait()

        inside = asyncio.ensure_future(stuck())
        await asyncio.sleep(0)

        async def fails() -> None:
            async with gate.drained():
                raise OSError("no such folder")

        installing = asyncio.ensure_future(fails())
        await asyncio.sleep(0)
        inside.cancel()
        with pytest.raises(OSError, match="no such folder"):
            await asyncio.wait_for(installing, timeout=10)
        async with gate.admitted():
            pass

    asyncio.run(run())
