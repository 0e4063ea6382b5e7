"""A rollout worker: takes requests, holds each until its weights are installed, samples the group, publishes it.

    requests ──▶ membership ──▶ intake ──▶ a task for each group ──▶ engine ──▶ trajectories, replies, dead letters
                     ▲                          │ the request is committed when its task is through
    weights ──▶ watcher ──▶ engine              └──────────────────────────────▶ requests' committed offsets

Threads: the asyncio loop owns the engine and every group; the consumer loop polls on a thread of its own and hands over by
`call_soon_threadsafe`; publishing has its thread. `serve` runs until `stop`; then nothing more is taken, groups that end soon are
finished, the others are handed back (not committed, so delivered again), and the worker says that it is gone: all within [run] drain_s.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from typing import Any

from echo_bus import profiles
from echo_bus.consumer_state import LoopLimits
from echo_bus.process import StopSignal
from echo_bus.publisher import Publisher
from echo_bus.request_reply import ReplyServer
from echo_bus.view import CompactedView
from echo_rollout.engines.acceptance import check_capabilities
from echo_rollout.engines.engine import Engine, SnapshotRef
from echo_rollout.evaluation_sampling import EvaluationSampler
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.generation import GroupSampler, Sample
from echo_rollout.group_work import GroupWork, Stations
from echo_rollout.heartbeat import GenerationTime, Heartbeat, first_status
from echo_rollout.holding import EARLY_ASKED_S, EARLY_S, Holding
from echo_rollout.in_hand_notes import DeathRecord, InHandNotes
from echo_rollout.intake import RequestIntake, Work
from echo_rollout.joining import find_others, still_work
from echo_rollout.membership import Membership
from echo_rollout.publishing import TrajectoryPublisher, trajectory_profile
from echo_rollout.receipts import Receipts
from echo_rollout.refusing import Refusals
from echo_rollout.undelivered import Undelivered
from echo_rollout.weights import WeightWatcher
from echo_rollout.worker_parts import WorkerParts
from echo_schemas.records import Purpose, WeightManifest, WorkerState
from echo_schemas.topics import REPLIES, REQUESTS, WEIGHTS, WORKERS, weights_key
from echo_tasks.task import Task

# Of the time that a worker has to end in: it finishes what it has in hand, then the log acknowledges that. Leaving the group, closing the
# engine and the interpreter's own end take the rest.
_FINISH_SHARE, _ACKNOWLEDGE_SHARE = 0.4, 0.1
# Groups in hand, as a multiple of those that the engine works on: the others wait for room, or for their acknowledgement.
_IN_HAND = 2
# A request that was put off is offered again when one in hand is done; this is for the rare case that none will be (one waits to be alone).
_BUSY_RETRY_S = 0.5
_LOOK_S = 1.0
GROUP = "worker"


class Worker:
    """One worker; `serve` once."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._undelivered = Undelivered(parts.metrics, parts.notices, parts.clock)
        self.is_ready = False
        """Whether weights are installed and requests are taken."""

    def problem(self) -> str | None:
        """Why the worker is not ready, as a sentence; None if it is."""
        return self._undelivered.problem() if self.is_ready else "No weights are installed yet."

    async def serve(self, stop: StopSignal) -> None:
        """Work until `stop`. Raises what ended it early: TransportError, EngineError, UserError; requests in hand are delivered again."""
        parts, key = self._parts, weights_key(self._parts.settings.run.name, None)
        failure = _Failure(asyncio.get_running_loop())
        with ExitStack() as stack:
            statuses = stack.enter_context(closing(parts.bus.publisher({**profiles.PRODUCER_LATENCY, **profiles.FOR_EVER})))
            generation = GenerationTime(parts.places, parts.clock)
            heartbeat = stack.enter_context(closing(_open_heartbeat(parts, statuses, generation)))
            heartbeat.start()
            view, others = await asyncio.gather(
                asyncio.to_thread(parts.bus.view, WEIGHTS, WeightManifest, only=key),
                asyncio.to_thread(find_others, parts.bus, parts.worker_id, parts.clock),
            )
            stack.enter_context(closing(view))
            for gone in others.long_gone:
                statuses.publish_tombstone(WORKERS, gone)
            serving = _Serving(parts, stack, statuses, heartbeat, generation, view, self._undelivered, failure)
            try:
                await serving.until(stop, others.ready, self._on_ready)
            finally:
                self.is_ready = False
                await serving.drain()
        failure.raise_it()

    def _on_ready(self) -> None:
        self.is_ready = True


class _Failure:
    """What ends the worker early; the first one counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] = loop.create_future()

    @property
    def is_there(self) -> bool:
        return self._future.done()

    def note(self, error: BaseException) -> None:
        """End the worker with `error`. From any thread."""

        def settle() -> None:
            if not self._future.done():
                self._future.set_exception(error)
                # Retrieved here, so that a worker which ends for another reason first leaves no complaint behind.
                self._future.exception()

        self.on_loop(settle)

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop; nothing happens once the loop is closed. From any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    async def or_done(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Wait for `coroutine`, or raise what ended the worker meanwhile."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        await asyncio.wait({task, self._future}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.raise_it()
        await task

    def raise_it(self) -> None:
        """If there is one."""
        if self._future.done():
            self._future.result()


class _Serving:
    """An engine that follows the weights; a place in the group; the groups in hand. Each of them may be there without the next."""

    def __init__(
        self,
        parts: WorkerParts,
        stack: ExitStack,
        statuses: Publisher,
        heartbeat: Heartbeat,
        generation: GenerationTime,
        weights: CompactedView[WeightManifest],
        undelivered: Undelivered,
        failure: _Failure,
    ) -> None:
        """`stack` closes what is opened here."""
        settings, rollout, key = parts.settings, parts.settings.rollout, weights_key(parts.settings.run.name, None)
        self._parts = parts
        self._heartbeat = heartbeat
        self._undelivered = undelivered
        self._failure = failure
        self._background: list[asyncio.Task[None]] = []
        self._engine = ExactVersions(parts.engine, parts.clock)
        self._watcher = WeightWatcher(
            self._engine,
            parts.source,
            newest=lambda: weights.get(key),
            folder=parts.folder,
            on_installed=self._on_installed,
            places=parts.places,
            notices=parts.notices,
            metrics=parts.metrics,
            clock=parts.clock,
        )
        weights.on_change(lambda _key, _record: failure.on_loop(self._watcher.wake))
        self._on_ready: Callable[[], None] = lambda: None

        publisher = stack.enter_context(closing(parts.bus.publisher(trajectory_profile(settings))))
        publishing = stack.enter_context(
            closing(TrajectoryPublisher(publisher, worker_id=parts.worker_id, engine=parts.engine_name, places=parts.places))
        )
        publishing.start()
        self._holding = Holding(
            rollout.groups_in_flight,
            installed=lambda: self._engine.installed,
            floor=lambda: 0 if (newest := weights.get(key)) is None else newest.next_seq,
            metrics=parts.metrics,
            clock=parts.clock,
            published=lambda: None if (newest := weights.get(key)) is None else newest.version,
            early_s=EARLY_ASKED_S if settings.run.mode == "sequential" else EARLY_S,
        )
        notes = InHandNotes(session=uuid.uuid4().hex[:8])
        server = ReplyServer(statuses, REPLIES, namespace=parts.bus.namespace, metrics=parts.bus.metrics, clock=parts.clock)
        receipts = Receipts(
            server, worker_id=parts.worker_id, installed=lambda: self._engine.installed, clock=parts.clock, on_error=failure.note
        )
        self._intake = RequestIntake(
            parts.codec,
            DeathRecord(parts.journal, notes),
            capacity=_IN_HAND * rollout.groups_in_flight,
            vocabulary=parts.vocabulary,
            max_length=settings.policy.max_length,
            take=lambda work: failure.on_loop(lambda: self._groups.begin(work)),
            clock=parts.clock,
            receipts=receipts,
            is_stuck=lambda: undelivered.is_stuck,
            num_early=lambda: self._holding.num_early,
        )
        self._groups = GroupWork(
            Stations(
                intake=self._intake,
                holding=self._holding,
                notes=notes,
                sample=_sampling(parts, self._engine, stack),
                publishing=publishing,
                receipts=receipts,
                refusals=Refusals(parts.worker_id, resends=rollout.resends),
                undelivered=undelivered,
                generation=generation,
                heartbeat=heartbeat,
                metrics=parts.metrics,
                clock=parts.clock,
            ),
            on_error=failure.note,
        )
        self._notes = notes
        drain_s = (_FINISH_SHARE + _ACKNOWLEDGE_SHARE) * settings.run.drain_s
        loop = parts.bus.consumer(
            [REQUESTS],
            GROUP,
            self._intake,
            publisher,
            next_generation=settings.kafka.group_protocol == "consumer",
            limits=LoopLimits(drain_s=drain_s, busy_retry_s=_BUSY_RETRY_S),
        )
        loop.keep_notes(notes)
        notes.changed = loop.commit_soon
        self._holding.on_early = loop.offer_again
        loop.on_assignment(lambda keys: heartbeat.has(partition for _, partition in keys))
        self.membership = Membership(loop, may_join=parts.may_join, on_error=failure.note)

    async def until(self, stop: StopSignal, others: frozenset[str], on_ready: Callable[[], None]) -> None:
        """Start the engine and work. `others` say that they take requests. `on_ready`: weights are installed. Raises what ends it early."""
        self._on_ready = on_ready
        self._spawn(self._tell())
        self._spawn(self._join_unless(others))
        await self._failure.or_done(self._engine.start())
        check_capabilities(self._engine.capabilities, self._parts.settings.rollout)
        self._heartbeat.change(capabilities=self._engine.capabilities.described())
        self._spawn(self._watcher.run())
        stopped = asyncio.Event()
        stop.on_set(lambda: self._failure.on_loop(stopped.set))
        await self._failure.or_done(_wait(stopped))

    async def drain(self) -> None:
        """Take nothing more, finish what ends soon, hand back the rest, leave the group, close the engine."""
        self.membership.take_no_more()
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        if not self._failure.is_there:
            self._heartbeat.change(state=WorkerState.DRAINING)
        drain_s = 0.0 if self._failure.is_there else self._parts.settings.run.drain_s
        await self._groups.drain(finish_s=_FINISH_SHARE * drain_s, acknowledge_s=_ACKNOWLEDGE_SHARE * drain_s)
        if not self._notes.blames:
            self._intake.forgive()
        await self.membership.leave()
        await self._engine.close()

    def _on_installed(self, ref: SnapshotRef) -> None:
        """Acknowledge, and let the groups go on that waited for it."""
        self._on_ready()
        self.membership.join()
        self._heartbeat.change(state=WorkerState.READY, installed=(ref.version, ref.sha256))
        self._holding.weights_changed()

    async def _join_unless(self, others: frozenset[str]) -> None:
        """Where nobody works: joining the group takes as long as the engine's start, and what arrives meanwhile is held."""
        parts = self._parts
        if not await asyncio.to_thread(still_work, parts.bus, others, heartbeat_s=parts.settings.rollout.heartbeat_s):
            self.membership.join()

    async def _tell(self) -> None:
        """Say what stands still, until cancelled."""
        while True:
            self._watcher.look()
            self._undelivered.look()
            await asyncio.sleep(_LOOK_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run `coroutine` in the background; what it raises ends the worker."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(
            lambda ended: None if ended.cancelled() or (error := ended.exception()) is None else self._failure.note(error)
        )
        self._background.append(task)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _open_heartbeat(parts: WorkerParts, publisher: Publisher, generation: GenerationTime) -> Heartbeat:
    rollout = parts.settings.rollout
    status = first_status(
        run_id=parts.settings.run.name,
        worker_id=parts.worker_id,
        engine=parts.engine_name,
        price_per_hour=rollout.price_per_hour,
        kind=parts.kind,
        capacity=_IN_HAND * rollout.groups_in_flight,
    )
    return Heartbeat(publisher, status, generation, parts.clock, every_s=rollout.heartbeat_s)


def _sampling(parts: WorkerParts, engine: ExactVersions, stack: ExitStack) -> Callable[[Work], Coroutine[Any, Any, list[Sample]]]:
    """How a group is sampled: under the newest version, or, of an evaluation, under the one that it names."""

    def open_sampler(engine: Engine, task: Task) -> GroupSampler:
        return GroupSampler(engine, task, parts.codec, vocabulary=parts.vocabulary, on_empty=parts.metrics.empty.inc)

    def manifest_of(version: int) -> WeightManifest | None:
        """Of any version that was published: read when asked for, since only few ever are. Blocks; raises TransportError."""
        key = weights_key(parts.settings.run.name, version)
        return parts.bus.newest(WEIGHTS, WeightManifest, only=key).get(key)

    ordinary = stack.enter_context(closing(open_sampler(engine, parts.task)))
    evaluating = stack.enter_context(
        closing(
            EvaluationSampler(
                engine,
                parts.source,
                parts.folder,
                manifest_of=manifest_of,
                tasks=parts.evaluation_tasks,
                own_task=parts.task,
                open_sampler=lambda task: open_sampler(parts.engine, task),
            )
        )
    )

    async def sample(work: Work) -> list[Sample]:
        if work.request.purpose is Purpose.EVAL:
            return await evaluating.sample(work.request, work.prompt)
        return await ordinary.sample(work.prompt)

    return sample
