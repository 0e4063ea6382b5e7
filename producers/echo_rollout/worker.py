"""A rollout worker: takes requests, holds each until its weights are installed, samples the group, publishes it.

    requests ──consumer loop──▶ intake ──▶ asyncio loop: wait for version → engine ──▶ publishing thread ──▶ trajectories
                  ▲ committed when acknowledged                    ▲ weights watcher ──▶ workers (acknowledgement)

Threads: the asyncio loop owns the engine and every group; the consumer loop polls on a thread of its own and hands over by
`call_soon_threadsafe`; publishing has its thread. `serve` runs until `stop`; then nothing more is taken, groups that end within
`DRAIN_S` are finished, the others are handed back (not committed, so delivered again), and the worker says that it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_bus import profiles
from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_bus.consumer import ConsumerLoop
from echo_bus.consumer_state import LoopLimits
from echo_bus.places import PlaceTimes
from echo_bus.process import StopSignal
from echo_bus.publisher import Publisher
from echo_bus.settings import Settings
from echo_rollout.engines.engine import Engine, SnapshotRef
from echo_rollout.generation import EmptyGeneration, EnvironmentFailed, GroupSampler, Sample, UnfitGeneration
from echo_rollout.heartbeat import GenerationTime, Heartbeat, first_status
from echo_rollout.intake import ChatCodec, RequestIntake, Work
from echo_rollout.journal import CrashJournal
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.publishing import Failure, FinishedGroup, Outcome, TrajectoryPublisher
from echo_rollout.weights import SnapshotSource, WeightWatcher
from echo_schemas.errors import EchoError
from echo_schemas.records import RolloutRequest, WeightManifest, WorkerState
from echo_schemas.topics import REQUESTS, WEIGHTS, weights_key
from echo_tasks.task import Task

logger = logging.getLogger(__name__)

DRAIN_S = 4.0
"""How long a worker that was told to stop works on what it has in hand."""
# How long it then waits for the log to acknowledge the groups that were finished.
_ACKNOWLEDGE_S = 2.0
# Of each four groups that the engine works on, one more waits inside it: a place is free as soon as one sample of a group has ended.
_WAITING_SHARE = 4
# Groups in hand, as a multiple of those that the engine works on: the others wait for room, or for their acknowledgement.
_IN_HAND = 2
# A request that was put off is offered again when one in hand is done; this is for the rare case that none will be (one waits to be alone).
_BUSY_RETRY_S = 0.5
GROUP = "worker"
_FAILURES: dict[type[EchoError], Failure] = {
    EmptyGeneration: Failure.EMPTY,
    EnvironmentFailed: Failure.ENVIRONMENT,
    UnfitGeneration: Failure.INVALID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker works with. `folder` is empty and the worker's own; `vocabulary`: token ids are below it."""

    settings: Settings
    worker_id: str
    engine_name: str
    bus: Bus
    engine: Engine
    task: Task
    codec: ChatCodec
    vocabulary: int
    source: SnapshotSource
    journal: CrashJournal
    folder: Path
    places: PlaceTimes
    metrics: WorkerMetrics
    clock: Clock


class Worker:
    """One worker; `serve` once."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._generation = GenerationTime(parts.places, parts.clock)
        self._sampler = GroupSampler(parts.engine, parts.task, parts.codec, vocabulary=parts.vocabulary, on_empty=parts.metrics.empty.inc)
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._emptied = asyncio.Event()
        self._holding: set[asyncio.Task[None]] = set()
        in_flight = parts.settings.rollout.groups_in_flight
        self._room = asyncio.Semaphore(in_flight + math.ceil(in_flight / _WAITING_SHARE))
        self.is_ready = False
        """Whether weights are installed and requests are taken."""

    async def serve(self, stop: StopSignal) -> None:
        """Work until `stop`. Raises what ended it early: TransportError, EngineError, UserError; requests in hand are delivered again."""
        parts = self._parts
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._installed = asyncio.Event()
        with ExitStack() as stack:
            stack.callback(self._sampler.close)
            statuses = stack.enter_context(closing(parts.bus.publisher(profiles.PRODUCER_LATENCY)))
            status = first_status(
                run_id=parts.settings.run.name,
                worker_id=parts.worker_id,
                engine=parts.engine_name,
                price_per_hour=parts.settings.rollout.price_per_hour,
            )
            every_s = parts.settings.rollout.heartbeat_s
            self._heartbeat = stack.enter_context(closing(Heartbeat(statuses, status, self._generation, parts.clock, every_s=every_s)))
            self._heartbeat.start()
            publisher = stack.enter_context(closing(parts.bus.publisher()))
            self._publishing = stack.enter_context(closing(self._open_publishing(publisher)))
            self._publishing.start()
            view = await asyncio.to_thread(parts.bus.view, WEIGHTS, WeightManifest)
            stack.enter_context(closing(view))
            key = weights_key(parts.settings.run.name, None)
            watcher = WeightWatcher(
                parts.engine,
                parts.source,
                newest=lambda: view.get(key),
                folder=parts.folder,
                on_installed=self._on_installed,
                places=parts.places,
                metrics=parts.metrics,
                clock=parts.clock,
            )
            view.on_change(lambda _key, _record: self._from_thread(watcher.wake))
            self._intake = self._open_intake()
            limits = LoopLimits(drain_s=DRAIN_S + _ACKNOWLEDGE_S, busy_retry_s=_BUSY_RETRY_S)
            next_generation = parts.settings.kafka.group_protocol == "consumer"
            loop = parts.bus.consumer([REQUESTS], GROUP, self._intake, publisher, next_generation=next_generation, limits=limits)
            consuming = threading.Thread(target=self._consume, args=(loop.run,), name="requests", daemon=True)
            # Joining the group takes as long as the engine's start, and what arrives meanwhile is held.
            consuming.start()
            watching: asyncio.Task[None] | None = None
            try:
                await self._until_failed(parts.engine.start())
                self._heartbeat.change(capabilities=parts.engine.capabilities.described())
                watching = self._spawn(watcher.run())
                await self._until_failed(self._stopped(stop))
            finally:
                await self._drain(loop, consuming, watching)
        self._raise_failure()

    def _open_publishing(self, publisher: Publisher) -> TrajectoryPublisher:
        parts = self._parts
        return TrajectoryPublisher(
            publisher,
            worker_id=parts.worker_id,
            engine=parts.engine_name,
            places=parts.places,
            metrics=parts.metrics,
            clock=parts.clock,
            on_error=self._fail,
        )

    def _open_intake(self) -> RequestIntake:
        parts = self._parts
        return RequestIntake(
            parts.codec,
            parts.journal,
            capacity=_IN_HAND * parts.settings.rollout.groups_in_flight,
            vocabulary=parts.vocabulary,
            max_length=parts.settings.policy.max_length,
            take=lambda work: self._from_thread(lambda: self._begin(work)),
            clock=parts.clock,
        )

    def _consume(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as exc:  # the edge of the thread: `serve` raises it
            self._fail(exc)

    async def _stopped(self, stop: StopSignal) -> None:
        stopped = asyncio.Event()
        stop.on_set(lambda: self._from_thread(stopped.set))
        await stopped.wait()

    def _begin(self, work: Work) -> None:
        """On the loop: a request was taken in hand."""
        if self._draining:
            self._end(work, Outcome.ABANDONED, None)
        else:
            self._spawn(self._group(work))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _group(self, work: Work) -> None:
        """One request from hand-over to the publishing thread. Raises EngineError: the prompt was checked, so the engine is at fault."""
        outcome = Outcome.ABANDONED
        failure: Failure | None = None
        try:
            closed = await self._hold(work.request)
            if closed is not None:
                outcome = closed
                return
            try:
                outcome, failure = await self._generate(work)
            finally:
                if not work.request.exact:
                    self._room.release()
        finally:
            if outcome is not Outcome.PUBLISHED:
                self._end(work, outcome, failure)

    async def _hold(self, request: RolloutRequest) -> Outcome | None:
        """Until its weights are installed and the engine has room, which is taken; None then, else how the request is closed."""
        task = asyncio.current_task()
        assert task is not None, "a group runs as a task"
        self._holding.add(task)
        try:
            closed = await self._until_installed(request)
            # An exact one waits for nobody: it is small, and worth nothing once the next version is there.
            if closed is not None or request.exact:
                return closed
            await self._room.acquire()
            if self._left_s(request) <= 0:
                self._room.release()
                return Outcome.EXPIRED
            return None
        finally:
            self._holding.discard(task)

    async def _until_installed(self, request: RolloutRequest) -> Outcome | None:
        """Until the weights that the request requires are installed; None then, else how the request is closed."""
        metrics = self._parts.metrics
        metrics.waiting.inc()
        try:
            while True:
                left_s = self._left_s(request)
                if left_s <= 0:
                    return Outcome.EXPIRED
                ref = self._parts.engine.installed
                if ref is not None and ref.version >= request.required_version:
                    is_wrong = request.exact and ref.version != request.required_version
                    return Outcome.SUPERSEDED if is_wrong else None
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._installed.wait(), left_s if left_s < math.inf else None)
        finally:
            metrics.waiting.dec()

    def _left_s(self, request: RolloutRequest) -> float:
        """Seconds until the request is too old to be started."""
        return math.inf if request.deadline_ms is None else (request.deadline_ms - self._parts.clock.time_ms()) / 1000

    async def _generate(self, work: Work) -> tuple[Outcome, Failure | None]:
        """Sample the group and hand it to the publishing thread, which ends it."""
        parts, request = self._parts, work.request
        started_ms, started_s = parts.clock.time_ms(), parts.clock.monotonic_s()
        self._generation.move(generating=1)
        try:
            samples = await self._sampler.sample(work.prompt)
        except (EmptyGeneration, EnvironmentFailed, UnfitGeneration) as exc:
            logger.warning("Group %s is given up: %s", request.group_id, exc)
            return Outcome.FAILED, _FAILURES[type(exc)]
        finally:
            self._generation.move(generating=-1)
        parts.metrics.group_seconds.observe(parts.clock.monotonic_s() - started_s)
        if request.exact and any(span.version != request.required_version for sample in samples for span in sample.version_spans):
            return Outcome.SUPERSEDED, None
        self._generation.move(publishing=1)
        self._publishing.submit(
            FinishedGroup(
                request=request,
                prompt=work.text,
                samples=samples,
                started_ms=started_ms,
                finished_ms=parts.clock.time_ms(),
                ended=lambda outcome, failure: self._published(work, samples, outcome, failure),
            )
        )
        return Outcome.PUBLISHED, None

    def _published(self, work: Work, samples: list[Sample], outcome: Outcome, failure: Failure | None) -> None:
        """The publishing thread is through with a group. From any thread."""
        self._generation.move(publishing=-1)
        self._end(work, outcome, failure)
        if outcome is Outcome.PUBLISHED:
            tokens = sum(len(sample.logprobs) for sample in samples)
            self._heartbeat.count(samples=len(samples), tokens=tokens, in_flight=self._intake.num_in_hand)

    def _end(self, work: Work, outcome: Outcome, failure: Failure | None) -> None:
        """The group is out of hand. An abandoned one is not done: its request is delivered again. From any thread."""
        self._intake.ended(work, done=outcome is not Outcome.ABANDONED)
        metrics = self._parts.metrics
        metrics.groups.labels(outcome.value).inc()
        if failure is not None:
            metrics.failed.labels(failure.value).inc()
        num_in_hand = self._intake.num_in_hand
        metrics.in_flight.set(num_in_hand)
        if self._draining and not num_in_hand:
            self._from_thread(self._emptied.set)

    def _on_installed(self, ref: SnapshotRef) -> None:
        """On the loop: acknowledge, and let the groups go on that waited for it."""
        self.is_ready = True
        self._heartbeat.change(state=WorkerState.READY, installed=(ref.version, ref.sha256))
        self._installed.set()
        self._installed = asyncio.Event()

    async def _drain(self, loop: ConsumerLoop, consuming: threading.Thread, watching: asyncio.Task[None] | None) -> None:
        """Take nothing more, finish what ends soon, hand back the rest, leave the group."""
        self._draining = True
        self.is_ready = False
        loop.stop()
        if watching is not None:
            watching.cancel()
        if not self._failed.done():
            self._heartbeat.change(state=WorkerState.DRAINING)
        for task in self._holding:
            task.cancel()
        groups = {task for task in self._tasks if task is not watching}
        if groups and not self._failed.done():
            await asyncio.wait(groups, timeout=DRAIN_S)
        for task in groups:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.to_thread(self._publishing.close)
        # What was finished is committed once the log has it; what was not is nobody's to wait for.
        if self._intake.num_in_hand and not self._failed.done():
            either: set[asyncio.Future[Any]] = {self._failed, (emptied := self._loop.create_task(self._emptied.wait()))}
            await asyncio.wait(either, timeout=_ACKNOWLEDGE_S, return_when=asyncio.FIRST_COMPLETED)
            emptied.cancel()
        loop.hand_back()
        await asyncio.to_thread(consuming.join)
        await self._parts.engine.close()

    async def _until_failed(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Wait for `coroutine`, or raise what ended the worker meanwhile."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._raise_failure()
        await task

    def _raise_failure(self) -> None:
        if self._failed.done():
            self._failed.result()

    def _fail(self, error: BaseException) -> None:
        """End the worker with `error`; the first one counts. From any thread."""

        def settle() -> None:
            if not self._failed.done():
                self._failed.set_exception(error)
                # Retrieved here, so that a worker which ends for another reason first leaves no complaint behind.
                self._failed.exception()

        self._from_thread(settle)

    def _from_thread(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop; nothing happens once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
