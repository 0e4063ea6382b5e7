"""A rollout worker: takes requests, holds each until its weights are installed, samples the group, publishes it.

    requests ──▶ membership ──▶ intake ──▶ a task for each group ──▶ engine ──▶ trajectories, replies, dead letters
                     ▲                          │ the request is committed when its task is through
    weights ──▶ watcher ──▶ engine              └──────────────────────────────▶ requests' committed offsets

Threads: the asyncio loop owns the engine and every group; the consumer loop polls on a thread of its own and hands over by
`call_soon_threadsafe`; publishing has its thread. `serve` runs until `stop`; then nothing more is taken, groups that end soon are
finished, the others are handed back (not committed, so delivered again), and the worker says that it is gone: all within [run] drain_s.

On standby, by an order on `control`, it does the same with more time ([coordinator] release_s) and leaves the group, but its engine stays
and follows the weights: it takes requests again as soon as it has joined.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from typing import Any

from echo_bus.client import profiles
from echo_bus.reading.view import CompactedView
from echo_rollout.awaited import Failing
from echo_rollout.engines.acceptance import check_capabilities
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.joining import find_others, still_work
from echo_rollout.orders import WorkerOrders
from echo_rollout.undelivered import Undelivered
from echo_rollout.weights.watcher import WeightWatcher
from echo_rollout.worker_parts import WorkerParts
from echo_rollout.worker_setup import ACKNOWLEDGE_SHARE, FINISH_SHARE, Voice, open_crew, open_voice
from echo_runtime.process import StopSignal
from echo_schemas.records import Control, WeightManifest, WorkerState
from echo_schemas.topics import WEIGHTS, WORKERS, weights_key

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# The role whose orders to workers mean nothing in a run without it.
_COORDINATOR = "coordinator"


class Worker:
    """One worker; `serve` once."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._undelivered = Undelivered(parts.metrics, parts.notices, parts.clock)
        self.is_ready = False
        """Whether weights are installed, and requests are taken unless the worker stands by."""

    def problem(self) -> str | None:
        """Why the worker is not ready, as a sentence; None if it is."""
        return self._undelivered.problem() if self.is_ready else "No weights are installed yet."

    async def serve(self, stop: StopSignal) -> None:
        """Work until `stop`. Raises what ended it early: TransportError, EngineError, UserError; requests in hand are delivered again."""
        parts, key = self._parts, weights_key(self._parts.settings.run.name, None)
        failing = Failing(asyncio.get_running_loop())
        with ExitStack() as stack:
            statuses = stack.enter_context(closing(parts.bus.publisher({**profiles.PRODUCER_LATENCY, **profiles.FOR_EVER})))
            voice = open_voice(parts, stack, statuses)
            voice.heartbeat.start()
            view, control, others = await asyncio.gather(
                asyncio.to_thread(parts.bus.view, WEIGHTS, WeightManifest, only=key),
                asyncio.to_thread(parts.bus.orders),
                asyncio.to_thread(find_others, parts.bus, parts.worker_id, parts.clock),
            )
            stack.enter_context(closing(view))
            stack.enter_context(closing(control))
            for gone in others.long_gone:
                statuses.publish_tombstone(WORKERS, gone)
            serving = _Serving(parts, stack, voice, view, control, self._undelivered, failing)
            try:
                await serving.until(stop, others.ready, self._on_ready)
            finally:
                self.is_ready = False
                await serving.drain()
        failing.raise_it()

    def _on_ready(self) -> None:
        self.is_ready = True


class _Serving:
    """An engine that follows the weights; a place in the group; the groups in hand. Each of them may be there without the next."""

    def __init__(
        self,
        parts: WorkerParts,
        stack: ExitStack,
        voice: Voice,
        weights: CompactedView[WeightManifest],
        control: CompactedView[Control],
        undelivered: Undelivered,
        failing: Failing,
    ) -> None:
        """`stack` closes what is opened here."""
        key = weights_key(parts.settings.run.name, None)
        self._parts = parts
        self._heartbeat = voice.heartbeat
        self._undelivered = undelivered
        self._failing = failing
        self._background: list[asyncio.Task[None]] = []
        self._heard_others = threading.Event()
        self._on_ready: Callable[[], None] = lambda: None
        self._orders = _orders(parts, control)
        self._is_wanted = self._orders.wants_work()
        self._ordered = asyncio.Event()
        # Whether the worker joins before it has weights, and whether it has.
        self._joins_early = self._has_weights = False
        control.on_change(lambda _key, _order: failing.on_loop(self._ordered.set))
        self._engine = ExactVersions(parts.engine, parts.clock)
        self._watcher = WeightWatcher(
            self._engine,
            parts.newest_source or parts.source,
            newest=lambda: weights.get(key),
            folder=parts.folder,
            on_installed=self._on_installed,
            places=parts.places,
            notices=parts.notices,
            metrics=parts.metrics,
            clock=parts.clock,
        )
        weights.on_change(lambda _key, _record: failing.on_loop(self._watcher.wake))
        self._crew = open_crew(parts, stack, voice, weights, self._engine, undelivered, failing)

    async def until(self, stop: StopSignal, others: frozenset[str], on_ready: Callable[[], None]) -> None:
        """Start the engine and work. `others` say that they take requests. `on_ready`: weights are installed. Raises what ends it early."""
        self._on_ready = on_ready
        self._spawn(self._tell())
        self._spawn(self._obey())
        self._spawn(self._join_unless(others))
        await self._failing.or_done(self._engine.start())
        settings = self._parts.settings
        check_capabilities(self._engine.capabilities, settings.rollout, replays_experts=settings.policy.replay_experts)
        self._heartbeat.change(capabilities=self._engine.capabilities.described(), peer_address=self._parts.peer_address)
        self._spawn(self._watcher.run())
        stopped = asyncio.Event()
        stop.on_set(lambda: self._failing.on_loop(stopped.set))
        await self._failing.or_done(_wait(stopped))

    async def drain(self) -> None:
        """Take nothing more, finish what ends soon, hand back the rest, leave the group, close the engine."""
        self._crew.membership.take_no_more()
        # Nobody listens for them any more.
        self._heard_others.set()
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        if not self._failing.is_there:
            self._heartbeat.change(state=WorkerState.DRAINING)
        drain_s = 0.0 if self._failing.is_there else self._parts.settings.run.drain_s
        await self._crew.groups.drain(finish_s=FINISH_SHARE * drain_s, acknowledge_s=ACKNOWLEDGE_SHARE * drain_s)
        if not self._crew.notes.blames:
            self._crew.intake.forgive()
        await self._crew.membership.leave()
        await self._engine.close()

    def _on_installed(self, ref: SnapshotRef) -> None:
        """Acknowledge, and let the groups go on that waited for it."""
        self._on_ready()
        self._has_weights = True
        self._join_if_wanted()
        self._heartbeat.change(state=self._state(), installed=(ref.version, ref.sha256))
        self._crew.holding.weights_changed()

    async def _join_unless(self, others: frozenset[str]) -> None:
        """Where nobody works: joining the group takes as long as the engine's start, and what arrives meanwhile is held."""
        parts = self._parts
        heartbeat_s = parts.settings.rollout.heartbeat_s
        if not await asyncio.to_thread(still_work, parts.bus, others, self._heard_others, heartbeat_s=heartbeat_s):
            self._joins_early = True
            self._join_if_wanted()

    async def _obey(self) -> None:
        """Stand by and take part as ordered, until cancelled. An order that comes while the worker leaves is obeyed when it has left."""
        while True:
            is_wanted = self._orders.wants_work()
            if is_wanted is not self._is_wanted:
                self._is_wanted = is_wanted
                await (self._take_part() if is_wanted else self._stand_by())
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), _LOOK_S)
            self._ordered.clear()

    async def _take_part(self) -> None:
        logger.info("Taking part again, by order")
        self._join_if_wanted()
        self._say_state()

    async def _stand_by(self) -> None:
        """Take nothing more, finish what ends within release_s, hand back the rest, leave the group. Engine and weights go on."""
        crew, release_s = self._crew, self._parts.settings.coordinator.release_s
        logger.info("On standby, by order; what is in hand is finished within %g s or handed back", release_s)
        crew.membership.take_no_more()
        self._say_state()
        if crew.membership.is_in:
            await crew.groups.drain(finish_s=release_s, acknowledge_s=release_s)
            await crew.membership.leave()
            crew.groups.resume()

    def _say_state(self) -> None:
        """Before it has weights, a worker is starting, whatever it was ordered."""
        if self._has_weights:
            self._heartbeat.change(state=self._state())

    def _join_if_wanted(self) -> None:
        if self._is_wanted and (self._has_weights or self._joins_early):
            self._crew.membership.join()

    def _state(self) -> WorkerState:
        """Of a worker that has weights."""
        return WorkerState.READY if self._is_wanted else WorkerState.STANDBY

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
            lambda ended: None if ended.cancelled() or (error := ended.exception()) is None else self._failing.note(error)
        )
        self._background.append(task)


def _orders(parts: WorkerParts, control: CompactedView[Control]) -> WorkerOrders:
    void = None if parts.settings.coordinator.enabled else parts.bus.namespace.client_id(_COORDINATOR)
    return WorkerOrders(control, run_id=parts.settings.run.name, worker_id=parts.worker_id, void=void)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
