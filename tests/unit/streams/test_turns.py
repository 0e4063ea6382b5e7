"""Scoring processes without processes: whose turn it is, and how much may be printed."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, cast

from echo_streams.pool import PRINTED_BYTES, _Turns, pass_bounded


def test_a_process_goes_to_the_function_that_had_the_least_time() -> None:
    async def run() -> list[str]:
        turns, order = _Turns(), []
        process: Any = cast("Any", object())
        turns.give_back(process, "", 0.0)

        async def call(origin: str, seconds: float) -> None:
            taken = await turns.take(origin)
            order.append(origin)
            await asyncio.sleep(0)
            turns.give_back(taken, origin, seconds)

        await asyncio.gather(*(call("hangs", 5.0) for _ in range(3)), *(call("healthy", 0.01) for _ in range(4)))
        return order

    assert asyncio.run(run()) == ["hangs", "healthy", "healthy", "healthy", "healthy", "hangs", "hangs"]


def test_a_cancelled_turn_is_given_to_the_next() -> None:
    async def run() -> None:
        turns = _Turns()
        process: Any = cast("Any", object())
        first, second = asyncio.create_task(turns.take("a")), asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        turns.give_back(process, "", 0.0)
        first.cancel()
        async with asyncio.timeout(60):
            assert await second is process

    asyncio.run(run())


def test_what_functions_print_is_cut_off_once_a_minute() -> None:
    now_s = 0.0
    (reading, printing), (kept, passing) = os.pipe(), os.pipe()

    def pass_on() -> None:
        pass_bounded(reading, passing, lambda: now_s)
        os.close(passing)

    thread = threading.Thread(target=pass_on)
    thread.start()
    found = bytearray()

    def read_until(end: bytes) -> None:
        while not found.endswith(end):
            found.extend(os.read(kept, 1 << 20))

    printer = threading.Thread(target=lambda: [os.write(printing, b"x" * 1024) for _ in range(200)])
    printer.start()
    read_until(b"left out.]\n")
    printer.join(60)
    assert found.count(b"x") == PRINTED_BYTES
    now_s = 61.0
    # Pieces that are on their way may fall into either minute.
    os.write(printing, b"the next minute")
    os.close(printing)
    while data := os.read(kept, 1 << 20):
        found.extend(data)
    thread.join(60)
    assert not thread.is_alive()
    assert PRINTED_BYTES <= len(found) <= 3 * PRINTED_BYTES
    for descriptor in (reading, kept):
        os.close(descriptor)
