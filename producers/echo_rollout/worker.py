"""A rollout worker: takes requests, holds each until its weights are installed, samples the group, publishes it.

    requests ──consumer loop──▶ intake ──▶ asyncio loop: wait for version → engine ──▶ publishing thread ──▶ trajectories
                  ▲ committed when acknowledged                    ▲ weights watcher ──▶ workers (acknowledgement)  └▶ replies, if asked

Threads: the asyncio loop owns the engine and every group; the consumer loop polls on a thread of its own and hands over by
`call_soon_threadsafe`; publishing has its thread. `serve` runs until `stop`; then nothing more is taken, groups that end soon are
finished, the others are handed back (not committed, so delivered again), and the worker says that it is gone: all within [run] drain_s.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from typing import Any

from echo_bus import profiles
from echo_bus.consumer import ConsumerLoop
from echo_bus.consumer_state import LoopLimits
from echo_bus.errors import TransportError
from echo_bus.process import StopSignal
from echo_bus.publisher import Publisher
from echo_bus.request_reply_server import ReplyServer
from echo_rollout.engines.acceptance import check_capabilities
from echo_rollout.engines.engine import AnswerUnusable, Engine, SnapshotRef
from echo_rollout.evaluation_sampling import EvaluationSampler
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.generation import EmptyGeneration, EnvironmentFailed, GroupSampler, Sample, UnfitGeneration
from echo_rollout.heartbeat import GenerationTime, Heartbeat, first_status
from echo_rollout.holding import EARLY_ASKED_S, EARLY_S, Holding
from echo_rollout.in_hand_notes import DeathRecord, InHandNotes
from echo_rollout.intake import RequestIntake, Work
from echo_rollout.joining import find_others
from echo_rollout.older_snapshots import VersionNotKept
from echo_rollout.publishing import Ending, Failure, FinishedGroup, Outcome, TrajectoryPublisher, trajectory_profile
from echo_rollout.receipts import Receipts
from echo_rollout.refusing import Refusals
from echo_rollout.undelivered import Undelivered
from echo_rollout.weights import WeightWatcher
from echo_rollout.worker_parts import WorkerParts
from echo_schemas.errors import EchoError
from echo_schemas.records import Purpose, WeightManifest, WorkerState
from echo_schemas.topics import REPLIES, REQUESTS, WEIGHTS, WORKERS, weights_key
from echo_tasks.task import Task

logger = logging.getLogger(__name__)

# Of the time that a worker has to end in: it finishes what it has in hand, then the log acknowledges that. Leaving the group, closing the
# engine and the interpreter's own end take the rest.
_FINISH_SHARE, _ACKNOWLEDGE_SHARE = 0.4, 0.1
# Groups in hand, as a multiple of those that the engine works on: the others wait for room, or for their acknowledgement.
_IN_HAND = 2
# A request that was put off is offered again when one in hand is done; this is for the rare case that none will be (one waits to be alone).
_BUSY_RETRY_S = 0.5
_LOOK_S = 1.0
GROUP = "worker"
_FAILURES: dict[type[EchoError], Failure] = {
    EmptyGeneration: Failure.EMPTY,
    EnvironmentFailed: Failure.ENVIRONMENT,
    UnfitGeneration: Failure.INVALID,
    AnswerUnusable: Failure.UNUSABLE,
}


class Worker:
    """One worker; `serve` once."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._generation = GenerationTime(parts.places, parts.clock)
        self._engine = ExactVersions(parts.engine, parts.clock)
        self._sampler = self._open_sampler(self._engine, parts.task)
        self._tasks: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._draining = False
        self._emptied = asyncio.Event()
        self._newest: Callable[[], WeightManifest | None] = lambda: None
        self._holding = Holding(
            parts.settings.rollout.groups_in_flight,
            installed=lambda: self._engine.installed,
            floor=lambda: 0 if (newest := self._newest()) is None else newest.next_seq,
            metrics=parts.metrics,
            clock=parts.clock,
            published=lambda: None if (newest := self._newest()) is None else newest.version,
            early_s=EARLY_ASKED_S if parts.settings.run.mode == "sequential" else EARLY_S,
        )
        self._join: Callable[[], None] | None = None
        self._undelivered = Undelivered(parts.metrics, parts.notices, parts.clock)
        self._refusals = Refusals(parts.worker_id, resends=parts.settings.rollout.resends, on_error=self._fail)
        self._notes = InHandNotes(session=uuid.uuid4().hex[:8])
        self.is_ready = False
        """Whether weights are installed and requests are taken."""

    def problem(self) -> str | None:
        """Why the worker is not ready, as a sentence; None if it is."""
        return self._undelivered.problem() if self.is_ready else "No weights are installed yet."

    async def serve(self, stop: StopSignal) -> None:
        """Work until `stop`. Raises what ended it early: TransportError, EngineError, UserError; requests in hand are delivered again."""
        parts = self._parts
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        with ExitStack() as stack:
            stack.callback(self._sampler.close)
            statuses = stack.enter_context(closing(parts.bus.publisher({**profiles.PRODUCER_LATENCY, **profiles.FOR_EVER})))
            self._heartbeat = stack.enter_context(closing(self._open_heartbeat(statuses)))
            self._heartbeat.start()
            publisher = stack.enter_context(closing(parts.bus.publisher(trajectory_profile(parts.settings))))
            self._publishing = stack.enter_context(closing(self._open_publishing(publisher)))
            self._publishing.start()
            key = weights_key(parts.settings.run.name, None)
            view, others = await asyncio.gather(
                asyncio.to_thread(parts.bus.view, WEIGHTS, WeightManifest, only=key),
                asyncio.to_thread(find_others, parts.bus, parts.worker_id, parts.clock),
            )
            stack.enter_context(closing(view))
            for gone in others.long_gone:
                statuses.publish_tombstone(WORKERS, gone)
            self._newest = lambda: view.get(key)
            watcher = WeightWatcher(
                self._engine,
                parts.source,
                newest=self._newest,
                folder=parts.folder,
                on_installed=self._on_installed,
                places=parts.places,
                notices=parts.notices,
                metrics=parts.metrics,
                clock=parts.clock,
            )
            view.on_change(lambda _key, _record: self._from_thread(watcher.wake))
            self._evaluating = stack.enter_context(closing(self._open_evaluating()))
            self._receipts = self._open_receipts(statuses)
            self._intake = self._open_intake()
            drain_s = (_FINISH_SHARE + _ACKNOWLEDGE_SHARE) * parts.settings.run.drain_s
            limits = LoopLimits(drain_s=drain_s, busy_retry_s=_BUSY_RETRY_S)
            next_generation = parts.settings.kafka.group_protocol == "consumer"
            loop = parts.bus.consumer([REQUESTS], GROUP, self._intake, publisher, next_generation=next_generation, limits=limits)
            loop.keep_notes(self._notes)
            self._notes.changed = loop.commit_soon
            self._holding.on_early = loop.offer_again
            loop.on_assignment(lambda keys: self._heartbeat.has(partition for _, partition in keys))
            consuming = threading.Thread(target=self._consume, args=(loop.run,), name="requests", daemon=True)
            self._join = consuming.start if others.work else None
            if not others.work:
                # Joining the group takes as long as the engine's start, and what arrives meanwhile is held.
                consuming.start()
            try:
                self._background = {self._spawn(self._tell(watcher))}
                await self._until_failed(self._engine.start())
                check_capabilities(self._engine.capabilities, parts.settings.rollout)
                self._heartbeat.change(capabilities=self._engine.capabilities.described())
                self._background.add(self._spawn(watcher.run()))
                await self._until_failed(self._stopped(stop))
            finally:
                await self._drain(loop, consuming)
        self._raise_failure()

    def _open_heartbeat(self, publisher: Publisher) -> Heartbeat:
        parts, rollout = self._parts, self._parts.settings.rollout
        status = first_status(
            run_id=parts.settings.run.name,
            worker_id=parts.worker_id,
            engine=parts.engine_name,
            price_per_hour=rollout.price_per_hour,
            kind=parts.kind,
            capacity=_IN_HAND * rollout.groups_in_flight,
        )
        return Heartbeat(publisher, status, self._generation, parts.clock, every_s=rollout.heartbeat_s)

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

    def _open_receipts(self, publisher: Publisher) -> Receipts:
        parts, bus = self._parts, self._parts.bus
        server = ReplyServer(publisher, REPLIES, namespace=bus.namespace, metrics=bus.metrics, clock=parts.clock)
        return Receipts(server, worker_id=parts.worker_id, installed=lambda: self._engine.installed, clock=parts.clock, on_error=self._fail)

    def _open_sampler(self, engine: Engine, task: Task) -> GroupSampler:
        parts = self._parts
        return GroupSampler(engine, task, parts.codec, vocabulary=parts.vocabulary, on_empty=parts.metrics.empty.inc)

    def _open_evaluating(self) -> EvaluationSampler:
        parts = self._parts
        return EvaluationSampler(
            self._engine,
            parts.source,
            parts.folder,
            manifest_of=self._manifest_of,
            tasks=parts.evaluation_tasks,
            own_task=parts.task,
            open_sampler=lambda task: self._open_sampler(parts.engine, task),
        )

    def _manifest_of(self, version: int) -> WeightManifest | None:
        """Of any version that was published: read when asked for, since only few ever are. Blocks; raises TransportError."""
        key = weights_key(self._parts.settings.run.name, version)
        return self._parts.bus.newest(WEIGHTS, WeightManifest, only=key).get(key)

    def _open_intake(self) -> RequestIntake:
        parts = self._parts
        return RequestIntake(
            parts.codec,
            DeathRecord(parts.journal, self._notes),
            capacity=_IN_HAND * parts.settings.rollout.groups_in_flight,
            vocabulary=parts.vocabulary,
            max_length=parts.settings.policy.max_length,
            take=lambda work: self._from_thread(lambda: self._begin(work)),
            clock=parts.clock,
            receipts=self._receipts,
            is_stuck=lambda: self._undelivered.is_stuck,
            num_early=lambda: self._holding.num_early,
        )

    def _consume(self, run: Callable[[], None]) -> None:
        try:
            while not self._parts.may_join():
                if self._draining:
                    return
            run()
        except BaseException as exc:  # the edge of the thread: `serve` raises it
            self._fail(exc)

    async def _tell(self, watcher: WeightWatcher) -> None:
        """Say what stands still, until cancelled."""
        while True:
            watcher.look()
            self._undelivered.look()
            await asyncio.sleep(_LOOK_S)

    async def _stopped(self, stop: StopSignal) -> None:
        stopped = asyncio.Event()
        stop.on_set(lambda: self._from_thread(stopped.set))
        await stopped.wait()

    def _begin(self, work: Work) -> None:
        """On the loop: a request was taken in hand."""
        if self._draining:
            self._end(work, Ending(outcome=Outcome.ABANDONED))
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
        ending = Ending(outcome=Outcome.ABANDONED)
        try:
            closed = await self._holding.enter(work.request)
            if closed is not None:
                ending = closed
                return
            try:
                if await self._notes.noted(work.where):
                    ending = await self._generate(work)
            except TransportError:
                raise
            except Exception:  # whatever it is ends the worker, and it may be the request's doing, or that of one beside it
                self._notes.blames = not self._draining
                raise
            finally:
                self._holding.leave(work.request)
        finally:
            if ending.outcome is Outcome.ABANDONED:
                self._end(work, ending)
            elif ending.outcome is not Outcome.PUBLISHED:
                self._publishing.call_soon(lambda: self._end(work, ending))

    async def _generate(self, work: Work) -> Ending:
        """Sample the group and hand it to the publishing thread, which ends it."""
        parts, request = self._parts, work.request
        started_ms, started_s = parts.clock.time_ms(), parts.clock.monotonic_s()
        self._generation.move(generating=1)
        try:
            if request.purpose is Purpose.EVAL:
                samples = await self._evaluating.sample(request, work.prompt)
            else:
                samples = await self._sampler.sample(work.prompt)
        except VersionNotKept as exc:
            logger.warning("Group %s is not evaluated: %s", request.group_id, exc)
            return Ending(outcome=Outcome.SUPERSEDED, detail=exc.message)
        except (EmptyGeneration, EnvironmentFailed, UnfitGeneration, AnswerUnusable) as exc:
            logger.warning("Group %s is given up: %s", request.group_id, exc)
            return Ending(outcome=Outcome.FAILED, failure=_FAILURES[type(exc)], detail=exc.message)
        finally:
            self._generation.move(generating=-1)
        parts.metrics.group_seconds.observe(parts.clock.monotonic_s() - started_s)
        if request.exact and any(span.version != request.required_version for sample in samples for span in sample.version_spans):
            return Ending(outcome=Outcome.SUPERSEDED, detail="Other weights were installed while it was generated.")
        self._generation.move(publishing=1)
        self._undelivered.add(work)
        self._publishing.submit(
            FinishedGroup(
                request=request,
                prompt=work.text,
                samples=samples,
                started_ms=started_ms,
                finished_ms=parts.clock.time_ms(),
                ended=lambda ending: self._published(work, samples, ending),
            )
        )
        return Ending(outcome=Outcome.PUBLISHED)

    def _published(self, work: Work, samples: list[Sample], ending: Ending) -> None:
        """The publishing thread is through with a group. From any thread."""
        self._undelivered.remove(work)
        self._generation.move(publishing=-1)
        self._end(work, ending)
        if ending.outcome is Outcome.PUBLISHED:
            tokens = sum(len(sample.logprobs) for sample in samples)
            self._heartbeat.count(samples=len(samples), tokens=tokens, in_flight=self._intake.num_in_hand)

    def _end(self, work: Work, ending: Ending) -> None:
        """The group has ended; whoever wanted a receipt gets it first. From any thread."""
        if work.asked is not None and ending.outcome is Outcome.ABANDONED:
            self._receipts.abandon(work.asked)
        if work.asked is None or ending.outcome is Outcome.ABANDONED:
            self._let_go(work, ending)
        else:
            self._receipts.send(work.asked, ending, lambda: self._let_go(work, ending))

    def _let_go(self, work: Work, ending: Ending) -> None:
        """The group is out of hand. An abandoned one is not done: its request is delivered again. From any thread."""
        abandoned = ending.outcome is Outcome.ABANDONED
        refused = self._refusals.refusal_of(work, ending)
        self._intake.ended(work, done=not abandoned, blamed=abandoned and self._notes.blames, refused=refused)
        metrics = self._parts.metrics
        metrics.groups.labels(ending.outcome.value).inc()
        if ending.failure is not None:
            metrics.failed.labels(ending.failure.value).inc()
        num_in_hand = self._intake.num_in_hand
        metrics.in_flight.set(num_in_hand)
        if self._draining and not num_in_hand:
            self._from_thread(self._emptied.set)

    def _on_installed(self, ref: SnapshotRef) -> None:
        """On the loop: acknowledge, and let the groups go on that waited for it."""
        self.is_ready = True
        if self._join is not None and not self._draining:
            self._join()
            self._join = None
        self._heartbeat.change(state=WorkerState.READY, installed=(ref.version, ref.sha256))
        self._holding.weights_changed()

    async def _drain(self, loop: ConsumerLoop, consuming: threading.Thread) -> None:
        """Take nothing more, finish what ends soon, hand back the rest, leave the group."""
        self._draining = True
        self.is_ready = False
        loop.stop()
        for task in self._background:
            task.cancel()
        if not self._failed.done():
            self._heartbeat.change(state=WorkerState.DRAINING)
        self._holding.cancel()
        self._notes.stop()
        groups = {task for task in self._tasks if task not in self._background}
        if groups and not self._failed.done():
            await asyncio.wait(groups, timeout=_FINISH_SHARE * self._parts.settings.run.drain_s)
        for task in groups:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.to_thread(self._publishing.close)
        # What was finished is committed once the log has it; what was not is nobody's to wait for.
        if self._intake.num_in_hand and not self._failed.done():
            either: set[asyncio.Future[Any]] = {self._failed, (emptied := self._loop.create_task(self._emptied.wait()))}
            await asyncio.wait(either, timeout=_ACKNOWLEDGE_SHARE * self._parts.settings.run.drain_s, return_when=asyncio.FIRST_COMPLETED)
            emptied.cancel()
        if not self._notes.blames:
            self._intake.forgive()
        loop.hand_back()
        if consuming.ident is not None:
            await asyncio.to_thread(consuming.join)
        await self._engine.close()

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
