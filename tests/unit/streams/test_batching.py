"""Batches out of arrivals: when they start, how large they are, how much is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from echo_bus.clock import ManualClock
from echo_core.bottleneck import Place, Use
from echo_runtime.places import PlaceTimes
from echo_streams import batching
from echo_streams.batching import MAX_BATCH, MAX_IN_FLIGHT, MAX_WAITING, Batcher

WAIT_S = 60.0
UNLUCKY = -1


class Stage:
    """A batcher whose batches end when the test says so."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.begun: list[list[int]] = []
        self.ended: list[list[int]] = []
        self.cancelled = 0
        self.may_end = asyncio.Event()
        self.batcher: Batcher[int] = Batcher(self._handle, places=PlaceTimes(self.registry, self.clock))

    async def _handle(self, batch: list[int]) -> None:
        self.begun.append(batch)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if UNLUCKY in batch:
            raise ValueError("unlucky")
        self.ended.append(batch)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            pytest.fail(f"waited for {what}; begun {list(map(len, self.begun))}, waiting {self.batcher.num_waiting}")


def on_stage(play: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        stage = Stage()
        running = asyncio.create_task(stage.batcher.run())
        try:
            await play(stage)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


async def put_all(batcher: Batcher[int], count: int) -> None:
    for number in range(count):
        await batcher.put(number)


def test_a_full_batch_starts_at_once_and_the_rest_follows() -> None:
    async def play(stage: Stage) -> None:
        await put_all(stage.batcher, MAX_BATCH + 1)
        await stage.until(lambda: len(stage.begun) == 2, "two batches")
        assert [len(batch) for batch in stage.begun] == [MAX_BATCH, 1]
        assert [number for batch in stage.begun for number in batch] == list(range(MAX_BATCH + 1))

    on_stage(play)


def test_arrivals_of_one_moment_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # A moment that a busy machine cannot stretch beyond its end.
    monkeypatch.setattr(batching, "LINGER_S", 1.0)

    async def play(stage: Stage) -> None:
        for number in range(16):
            await stage.batcher.put(number)
            await asyncio.sleep(0)
        await stage.until(lambda: bool(stage.begun), "a batch")
        assert stage.begun == [list(range(16))]

    on_stage(play)


def test_a_slow_batch_holds_nobody_up() -> None:
    async def play(stage: Stage) -> None:
        await stage.batcher.put(0)
        await stage.until(lambda: stage.begun == [[0]], "the first batch")
        await put_all(stage.batcher, 3)
        await stage.until(lambda: stage.begun == [[0], [0, 1, 2]], "the second batch beside it")
        assert stage.ended == []
        assert stage.batcher.num_in_flight == 4

    on_stage(play)


def test_what_is_under_way_is_bounded_and_then_arrivals_wait() -> None:
    async def play(stage: Stage) -> None:
        total = MAX_IN_FLIGHT + MAX_WAITING + 100
        putting = asyncio.create_task(put_all(stage.batcher, total))
        await stage.until(lambda: stage.batcher.num_waiting == MAX_WAITING, "a full inbox")
        assert sum(map(len, stage.begun)) == stage.batcher.num_in_flight == MAX_IN_FLIGHT
        assert not putting.done()
        stage.may_end.set()
        await putting
        async with asyncio.timeout(WAIT_S):
            await stage.batcher.drained()
        assert sorted(number for batch in stage.ended for number in batch) == list(range(total))
        assert (stage.batcher.num_waiting, stage.batcher.num_in_flight) == (0, 0)

    on_stage(play)


def test_a_failure_is_kept_and_ends_the_draining() -> None:
    async def play(stage: Stage) -> None:
        await stage.batcher.put(UNLUCKY)
        await stage.until(lambda: bool(stage.begun), "the batch that fails")
        stage.may_end.set()
        async with asyncio.timeout(WAIT_S):
            await stage.batcher.drained()
        assert str(stage.batcher.failure) == "unlucky"
        first = stage.batcher.failure
        await stage.batcher.put(UNLUCKY)
        await stage.until(lambda: len(stage.begun) == 2 and stage.batcher.num_in_flight == 0, "the next failure")
        assert stage.batcher.failure is first

    on_stage(play)


def test_the_end_of_run_cancels_what_is_under_way() -> None:
    async def run() -> Stage:
        stage = Stage()
        running = asyncio.create_task(stage.batcher.run())
        await stage.batcher.put(1)
        await stage.until(lambda: bool(stage.begun), "a batch")
        running.cancel()
        await stage.until(lambda: stage.cancelled == 1, "the batch's cancellation")
        assert stage.batcher.failure is None
        return stage

    asyncio.run(run())


def test_the_wait_for_arrivals_is_counted_as_empty() -> None:
    async def play(stage: Stage) -> None:
        # One turn of the loop takes `run` to where it waits.
        await asyncio.sleep(0)
        stage.clock.advance(2.0)
        await stage.batcher.put(1)
        await stage.until(lambda: bool(stage.begun), "a batch")
        assert stage.registry.get_sample_value("echo_place_seconds_total", {"place": Place.REWARD.value, "use": Use.EMPTY.value}) == 2.0

    on_stage(play)


def test_a_handler_may_be_any_coroutine_function() -> None:
    async def handle(_: list[str]) -> None:
        return None

    made: Callable[[list[str]], Coroutine[Any, Any, None]] = handle
    batcher: Batcher[str] = Batcher(made, places=PlaceTimes(CollectorRegistry(), ManualClock()))
    assert (batcher.num_waiting, batcher.num_in_flight, batcher.failure) == (0, 0, None)
