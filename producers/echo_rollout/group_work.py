"""The groups in hand: each is one task, which owns its request from acceptance to commit.

    accepted ─▶ admitted: weights, room, note ─▶ generated ─▶ published ─▶ answered, if asked ─▶ committed, or a dead letter
        │                       └─ its partition goes: given up
        └───────── cancelled or failed on the way: handed back, so that the request is delivered again

On the worker's asyncio loop alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from echo_bus.clock import Clock
from echo_bus.errors import TransportError
from echo_rollout.engines.engine import AnswerUnusable
from echo_rollout.generation import EmptyGeneration, EnvironmentFailed, Sample, UnfitGeneration
from echo_rollout.heartbeat import WorkerHeartbeat
from echo_rollout.holding import Holding
from echo_rollout.in_hand_notes import InHandNotes
from echo_rollout.intake import RequestIntake, Work
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.older_snapshots import VersionNotKept
from echo_rollout.publishing import Ending, FinishedGroup, GroupEnd, GroupFailure, TrajectoryPublisher
from echo_rollout.receipts import Receipts
from echo_rollout.refusing import Refusals
from echo_rollout.undelivered import Undelivered
from echo_runtime.logs import logged_with
from echo_schemas.errors import EchoError

logger = logging.getLogger(__name__)

_FAILURES: dict[type[EchoError], GroupFailure] = {
    EmptyGeneration: GroupFailure.EMPTY,
    EnvironmentFailed: GroupFailure.ENVIRONMENT,
    UnfitGeneration: GroupFailure.INVALID,
    AnswerUnusable: GroupFailure.UNUSABLE,
}


@dataclass(kw_only=True, eq=False)
class GroupWork:
    """All groups in hand, and the stations that each goes through. `begin` each; after `drain` nothing is begun until `resume`.

    `sample` raises as `GroupSampler.sample`, and VersionNotKept. `on_error` gets the error that ends the worker.
    """

    intake: RequestIntake
    holding: Holding
    notes: InHandNotes
    sample: Callable[[Work], Awaitable[list[Sample]]]
    publishing: TrajectoryPublisher
    receipts: Receipts
    refusals: Refusals
    undelivered: Undelivered
    heartbeat: WorkerHeartbeat
    metrics: WorkerMetrics
    clock: Clock
    on_error: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], Work] = {}
        self._generating: set[asyncio.Task[None]] = set()
        self._draining = False

    def begin(self, work: Work) -> None:
        """Start the task of a request that was taken in hand."""
        if self._draining:
            self._hand_back(work)
            return
        task = asyncio.get_running_loop().create_task(self._own(work))
        self._tasks[task] = work
        task.add_done_callback(self._ended)

    def drop(self, moved: Sequence[Work]) -> None:
        """End the tasks of requests that the intake has given up, so that they take no room."""
        gone = frozenset(moved)
        for task, work in list(self._tasks.items()):
            if work in gone:
                task.cancel()
        for _ in moved:
            self._count(Ending(outcome=GroupEnd.ABANDONED))

    async def drain(self, *, finish_s: float, acknowledge_s: float) -> None:
        """Begin no more groups. Those that generate have `finish_s` to end; those that are being published have `acknowledge_s` more.

        The requests of the others are handed back, so that other workers do them.
        """
        self._draining = True
        self.holding.cancel()
        self.notes.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=finish_s)
        await self._cancel(self._generating)
        # Only groups that wait for their acknowledgement are left.
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=acknowledge_s)
        await self._cancel(set(self._tasks))

    def resume(self) -> None:
        """Groups are begun again: the worker was on standby and takes requests."""
        self.notes.resume()
        self._draining = False

    async def _cancel(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in (cancelled := set(tasks)):
            task.cancel()
        if cancelled:
            await asyncio.wait(cancelled)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_error(error)

    async def _own(self, work: Work) -> None:
        """One request from acceptance to commit. Raises what ends the worker."""
        with logged_with(group=work.request.group_id):
            await self._see_through(work)

    async def _see_through(self, work: Work) -> None:
        try:
            logger.debug("Group %s is taken in hand", work.request.group_id)
            ending = await self._until_ended(work)
            if ending.failure is not None:
                logger.warning("Group %s is given up: %s", work.request.group_id, ending.said)
            elif ending.weights is not None:
                with logged_with(version=ending.weights.version):
                    logger.debug("Group %s is %s as attempt %s", work.request.group_id, ending.outcome.value, ending.attempt)
            else:
                logger.debug("Group %s is %s: %s", work.request.group_id, ending.outcome.value, ending.said)
            if work.asked is not None:
                await self.receipts.answer(work.asked, ending)
            refused = self.refusals.refusal_of(work, ending)
            if refused is None:
                self.intake.done(work)
            else:
                await self.publishing.call(partial(self.intake.done, work, refused))
        except BaseException:  # cancelled or failed: the request is delivered again
            self._hand_back(work)
            raise
        self._count(ending)
        self.refusals.check()

    async def _until_ended(self, work: Work) -> Ending:
        """Admission, generation, publication. Raises EngineError: the prompt was checked, so the engine is at fault."""
        closed = await self.holding.enter(work.request)
        if closed is not None:
            return closed
        try:
            if not await self.notes.noted(work.where) or not self.intake.begins(work):
                raise asyncio.CancelledError
            made = await self._generate(work)
        except TransportError:
            raise
        except Exception:  # any error here ends the worker, and one of the requests in hand may be the cause
            self.notes.blames = not self._draining
            raise
        finally:
            self.holding.leave(work.request)
        return await self._publish(work, made) if isinstance(made, FinishedGroup) else made

    async def _generate(self, work: Work) -> FinishedGroup | Ending:
        """The group with its samples, or how it ended without."""
        request = work.request
        started_ms, started_s = self.clock.time_ms(), self.clock.monotonic_s()
        try:
            with self._counted_as_generating():
                samples = await self.sample(work)
        except VersionNotKept as exc:
            logger.warning("Group %s is not evaluated: %s", request.group_id, exc)
            return Ending(outcome=GroupEnd.SUPERSEDED, detail=exc.message)
        except (EmptyGeneration, EnvironmentFailed, UnfitGeneration, AnswerUnusable) as exc:
            return Ending(outcome=GroupEnd.FAILED, failure=_FAILURES[type(exc)], detail=exc.message)
        self.metrics.group_seconds.observe(self.clock.monotonic_s() - started_s)
        logger.debug("Group %s is generated in %.3f s", request.group_id, self.clock.monotonic_s() - started_s)
        if request.exact and any(span.version != request.required_version for sample in samples for span in sample.version_spans):
            return Ending(outcome=GroupEnd.SUPERSEDED, detail="Other weights were installed while it was generated.")
        return FinishedGroup(
            request=request, prompt=work.text, samples=samples, started_ms=started_ms, finished_ms=self.clock.time_ms()
        )  # fmt: skip

    async def _publish(self, work: Work, group: FinishedGroup) -> Ending:
        samples = group.samples
        with self._counted_as_undelivered(work):
            ending = await self.publishing.publish(group)
        if ending.outcome is GroupEnd.PUBLISHED:
            tokens = sum(len(sample.logprobs) for sample in samples)
            self.metrics.trajectories.inc(len(samples))
            self.metrics.tokens.inc(tokens)
            self.heartbeat.count(samples=len(samples), tokens=tokens, in_flight=self.intake.num_in_hand - 1)
        return ending

    def _hand_back(self, work: Work) -> None:
        if self.intake.handed_back(work, blamed=self.notes.blames):
            self._count(Ending(outcome=GroupEnd.ABANDONED))

    def _count(self, ending: Ending) -> None:
        metrics = self.metrics
        metrics.groups.labels(ending.outcome.value).inc()
        if ending.failure is not None:
            metrics.failed.labels(ending.failure.value).inc()
        metrics.in_flight.set(self.intake.num_in_hand)

    @contextmanager
    def _counted_as_generating(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None, "a group runs as a task"
        self._generating.add(task)
        self.heartbeat.generation.move(generating=1)
        try:
            yield
        finally:
            self.heartbeat.generation.move(generating=-1)
            self._generating.discard(task)

    @contextmanager
    def _counted_as_undelivered(self, work: Work) -> Iterator[None]:
        self.heartbeat.generation.move(publishing=1)
        self.undelivered.add(work)
        try:
            yield
        finally:
            self.undelivered.remove(work)
            self.heartbeat.generation.move(publishing=-1)
