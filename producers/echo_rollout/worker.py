"""A rollout worker: takes requests, holds each until its weights are installed, samples the group, publishes it.

    requests ──▶ membership ──▶ intake ──▶ a task for each group ──▶ engine ──▶ trajectories, replies, dead letters
                     ▲                          │ the request is committed when its task is through
    weights ──▶ watcher ──▶ engine              └──────────────────────────────▶ requests' committed offsets

Threads: the asyncio loop owns the engine and every group; the consumer loop polls on a thread of its own and hands over by
`call_soon_threadsafe`; publishing has its thread. `serve` runs until `stop`; then no more requests are taken, groups that end soon are
finished, the others are handed back (not committed, so delivered again), and the worker's status becomes GONE: all within [run] drain_s.

An order on `control` puts the worker on standby: it does the same with more time ([coordinator] release_s) and leaves the consumer group,
but its engine goes on following the weights, so it takes requests again as soon as it has rejoined.
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
from echo_rollout.engines.engine import SnapshotRef, check_capabilities
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.heartbeat import WorkerHeartbeat
from echo_rollout.joining import find_others, still_work
from echo_rollout.undelivered import Undelivered
from echo_rollout.weights.watcher import WeightWatcher
from echo_rollout.worker_parts import WorkerParts
from echo_rollout.worker_setup import ACKNOWLEDGE_SHARE, FINISH_SHARE, open_crew, open_heartbeat
from echo_runtime.process import StopSignal
from echo_schemas.records import Control, WeightManifest, WorkerState
from echo_schemas.topics import WEIGHTS, WORKERS, weights_key, worker_order_key

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# The role whose orders to workers do not count in a run without it.
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
        """Work until `stop`. Raises the error that ends it early: TransportError, EngineError, UserError; then requests in hand are
        delivered again.
        """
        parts, key = self._parts, weights_key(self._parts.settings.run.name, None)
        failing = Failing(asyncio.get_running_loop())
        with ExitStack() as stack:
            statuses = stack.enter_context(closing(parts.bus.publisher({**profiles.PRODUCER_LATENCY, **profiles.FOR_EVER})))
            heartbeat = open_heartbeat(parts, stack, statuses)
            heartbeat.start()
            view, control, others = await asyncio.gather(
                asyncio.to_thread(parts.bus.view, WEIGHTS, WeightManifest, only=key),
                asyncio.to_thread(parts.bus.orders),
                asyncio.to_thread(find_others, parts.bus, parts.worker_id, parts.clock),
            )
            stack.enter_context(closing(view))
            stack.enter_context(closing(control))
            for gone in others.long_gone:
                statuses.publish_tombstone(WORKERS, gone)
            serving = _Serving(parts, stack, heartbeat, view, control, self._undelivered, failing)
            try:
                await serving.until(stop, others.ready, self._on_ready)
            finally:
                self.is_ready = False
                await serving.drain()
        failing.raise_it()

    def _on_ready(self) -> None:
        self.is_ready = True


class _Serving:
    """An engine that follows the weights, the membership in the consumer group, and the groups in hand."""

    def __init__(
        self,
        parts: WorkerParts,
        stack: ExitStack,
        heartbeat: WorkerHeartbeat,
        weights: CompactedView[WeightManifest],
        control: CompactedView[Control],
        undelivered: Undelivered,
        failing: Failing,
    ) -> None:
        """`stack` closes the parts that are opened here."""
        key = weights_key(parts.settings.run.name, None)
        self._parts = parts
        self._heartbeat = heartbeat
        self._undelivered = undelivered
        self._failing = failing
        self._background: list[asyncio.Task[None]] = []
        self._heard_others = threading.Event()
        self._on_ready: Callable[[], None] = lambda: None
        self._control = control
        self._is_wanted = self._wants_work()
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
        self._crew = open_crew(parts, stack, heartbeat, weights, self._engine, undelivered, failing)

    async def until(self, stop: StopSignal, others: frozenset[str], on_ready: Callable[[], None]) -> None:
        """Start the engine and work. `others`: workers that take requests by their status. `on_ready` is called when weights are installed.

        Raises the error that ends it early.
        """
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
        await self._failing.or_done(stopped.wait())

    async def drain(self) -> None:
        """Take no more requests, finish groups that end soon, hand back the rest, leave the consumer group, close the engine."""
        self._crew.membership.take_no_more()
        # Ends the wait of `_join_unless`.
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
        """Acknowledge the version, and let the groups go on that waited for it."""
        self._on_ready()
        self._has_weights = True
        self._join_if_wanted()
        self._heartbeat.change(state=self._state(), installed_version=ref.version, weights_sha256=ref.sha256)
        self._crew.holding.weights_changed()

    async def _join_unless(self, others: frozenset[str]) -> None:
        """Join early if none of `others` works: joining takes time too, and requests that arrive before the weights are held."""
        parts = self._parts
        heartbeat_s = parts.settings.rollout.heartbeat_s
        if not await asyncio.to_thread(still_work, parts.bus, others, self._heard_others, heartbeat_s=heartbeat_s):
            self._joins_early = True
            self._join_if_wanted()

    async def _obey(self) -> None:
        """Stand by and take part as ordered, until cancelled. An order that comes while the worker leaves is carried out after that."""
        while True:
            is_wanted = self._wants_work()
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
        """Take no more requests, finish groups that end within release_s, hand back the rest, leave the group. The engine goes on."""
        crew, release_s = self._crew, self._parts.settings.coordinator.release_s
        logger.info("On standby, by order; groups in hand are finished within %g s or handed back", release_s)
        crew.membership.take_no_more()
        self._say_state()
        if crew.membership.is_in:
            await crew.groups.drain(finish_s=release_s, acknowledge_s=release_s)
            await crew.membership.leave()
            crew.groups.resume()

    def _say_state(self) -> None:
        """Publish the state. A worker without weights stays STARTING, whatever its orders."""
        if self._has_weights:
            self._heartbeat.change(state=self._state())

    def _join_if_wanted(self) -> None:
        if self._is_wanted and (self._has_weights or self._joins_early):
            self._crew.membership.join()

    def _state(self) -> WorkerState:
        """The state of a worker that has weights."""
        return WorkerState.READY if self._is_wanted else WorkerState.STANDBY

    def _wants_work(self) -> bool:
        """Whether the worker shall take requests, by its order on `control`; without an order it shall. Raises the view's error.

        In a run without coordinator the coordinator's orders do not count, because it will not take them back.
        """
        parts = self._parts
        order = self._control.get(worker_order_key(parts.settings.run.name, parts.worker_id))
        if order is None or order.worker is None:
            return True
        is_void = not parts.settings.coordinator.enabled and order.issued_by == parts.bus.namespace.client_id(_COORDINATOR)
        return is_void or order.worker.active

    async def _tell(self) -> None:
        """Report standstills, until cancelled."""
        while True:
            self._watcher.look()
            self._undelivered.look()
            await asyncio.sleep(_LOOK_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run `coroutine` in the background; an error of it ends the worker."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(
            lambda ended: None if ended.cancelled() or (error := ended.exception()) is None else self._failing.note(error)
        )
        self._background.append(task)
