"""Builds one reward application and runs it, from the views that it reads to Faust's client.

Threads: everything runs on the event loop of `serve`; a view of the learner's progress reads on a thread of its own; the watch of the loop
counts what waits while a function holds the loop up.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from contextlib import closing
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from echo_bus.errors import TransportError
from echo_bus.reading.view import CompactedView
from echo_bus.requests.dispatch import WorkObserver
from echo_runtime.loop_watch import PLACE, LoopWatch, place_of
from echo_runtime.opening import throttle_report
from echo_runtime.process import RoleProcess
from echo_schemas.records import MissingRewards, Progress, Record
from echo_schemas.topics import TRAJECTORIES, missing_rewards_key
from echo_streams.attachment import RunEnd
from echo_streams.intake import Intake
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import ScoringPool
from echo_streams.processing import Processor
from echo_streams.scoring import Attached, RewardChoice, Scorer
from echo_streams.second_look import SecondLook, read_again
from echo_streams.security import login_of
from echo_tasks.rewards import RewardKind

if TYPE_CHECKING:
    # Faust takes seconds to import; the checks before should fail without it.
    from echo_streams.faust_app import AppOptions, RewardApp

logger = logging.getLogger(__name__)

# Share of the process's time to end in which it scores what was read. Faust takes more than a second to stop.
_FINISH_SHARE = 0.4


def static_member(role: str) -> str | None:
    """The name in the group of `reward.NAME` on this machine: processes of two machines may be called alike. None for `reward`, so that
    processes by hand need no names.
    """
    name = role.partition(".")[2]
    return f"{name}.{socket.gethostname()}" if name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationOptions:
    """Options of an application beside the run's own, as in `run_reward`."""

    beginning: str = ""
    share: float = 1.0
    ends_with_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationRun:
    """A reward application between its checks and its end.

    `group`: its consumer group; `choice`: the rewards of each purpose (None: every reward judges everything); `progress`: what the learner
    says of itself and of rewards that are missing.
    """

    process: RoleProcess
    name: str
    group: str
    attached: tuple[Attached, ...]
    choice: RewardChoice | None
    options: ApplicationOptions
    progress: CompactedView[Record]
    num_partitions: int

    async def serve(self) -> None:
        """Score until `process.stop`, or until the run is over for an application that ends with it."""
        from echo_streams.faust_app import RewardApp

        process = self.process
        metrics = StreamsMetrics(process.registry)
        pool = self._pool(metrics)
        processor = self._processor(pool, metrics)
        app = RewardApp(self._options(pool), processor.process, metrics=metrics, places=process.places, clock=process.clock)
        watch = LoopWatch(process.notices, process.clock, name=self._reward_at, meanwhile=lambda: self._count_backlog(app))
        process.health_checks[PLACE] = watch.check
        beside_it: list[asyncio.Task[None]] = []
        try:
            watch.start()
            if pool is not None:
                await pool.start()
            beside_it.append(asyncio.create_task(self._second_look(app, processor).run(), name="second look"))
            if self.options.ends_with_run:
                end = RunEnd(self._latest, lambda: app.num_done, process.clock)
                beside_it.append(asyncio.create_task(end.watch(process.stop), name="end of the run"))
            process.ready_checks["reward"] = lambda: None if app.joined else f"The group {self.group} is not joined yet."
            await app.run(process.stop)
        finally:
            watch.close()
            for task in beside_it:
                task.cancel()
            if pool is not None:
                pool.close()

    def _processor(self, pool: ScoringPool | None, metrics: StreamsMetrics) -> Processor:
        process, settings, bus = self.process, self.process.settings, self.process.bus
        scorer = Scorer(
            self.attached,
            run_id=settings.run.name,
            limits=settings.scoring,
            metrics=metrics,
            clock=process.clock,
            pool=pool,
            choice=self.choice,
            application=self.name,
            notices=process.notices,
        )
        intake = Intake(
            settings.run.name,
            budget=settings.budget,
            drop_stale=settings.staleness.over_budget == "drop",
            share=self.options.share,
            live_from_ms=process.clock.time_ms() if self.options.beginning else 0,
        )
        processor = Processor(bus, scorer, intake, group=self.group, learner_version=self._learner_version, metrics=metrics)
        processor.set_num_partitions(self.num_partitions)
        return processor

    def _options(self, pool: ScoringPool | None) -> AppOptions:
        from echo_streams.faust_app import AppOptions

        settings, bus = self.process.settings, self.process.bus
        return AppOptions(
            group=self.group,
            client_id=bus.client_id,
            bootstrap=bus.cluster.bootstrap,  # type: ignore[attr-defined]  # Faust speaks to real clusters only
            topic=bus.namespace.topic(TRAJECTORIES),
            login=login_of(settings.kafka.client),
            inline=pool is None and all(entry.function.kind is not RewardKind.ASYNC for entry in self.attached),
            gather=settings.run.mode != "sequential",
            static_member=static_member(bus.role),
            drain_s=_FINISH_SHARE * settings.run.drain_s,
            on_throttle=throttle_report(bus.metrics, self.process.notices),
            on_commit=lambda is_accepted: bus.metrics.commits.labels(self.group, "committed" if is_accepted else "failed").inc(),
        )

    def _second_look(self, app: RewardApp, processor: Processor) -> SecondLook:
        process = self.process
        return SecondLook(
            names=frozenset(entry.name for entry in self.attached),
            missing=self._missing,
            committed=app.committed,
            read=lambda places: read_again(process.bus, places),
            judge=processor.judge_again,
            send=app.send,
            clock=process.clock,
        )

    def _count_backlog(self, app: RewardApp) -> None:
        """Ask the cluster how much waits: Faust's client knows only as far as it has fetched, and the loop, which is held up, drives it."""
        bus = self.process.bus
        physical = bus.namespace.topic(TRAJECTORIES)
        try:
            with closing(WorkObserver(bus.cluster, physical=physical, group=self.group, client_id=bus.client_id)) as observer:
                app.set_lag(observer.observe(self.num_partitions))
        except TransportError as exc:
            logger.debug("What waits while the event loop is held up is not known: %s", exc)

    def _latest(self) -> Progress | None:
        latest = self.progress.get(self.process.settings.run.name)
        return latest if isinstance(latest, Progress) else None

    def _missing(self) -> MissingRewards | None:
        latest = self.progress.get(missing_rewards_key(self.process.settings.run.name))
        return latest if isinstance(latest, MissingRewards) else None

    def _learner_version(self) -> int | None:
        latest = self._latest()
        return None if latest is None else latest.version

    def _pool(self, metrics: StreamsMetrics) -> ScoringPool | None:
        functions = [entry.function for entry in self.attached if entry.function.kind is not RewardKind.ASYNC]
        scoring = self.process.settings.scoring
        if scoring.processes == 0 or not functions:
            return None
        return ScoringPool(
            functions, num_processes=scoring.processes, metrics=metrics, memory_mb=scoring.memory_mb, notices=self.process.notices
        )

    def _reward_at(self, frame: FrameType) -> str | None:
        """The reward function of a frame, with advice about one that blocks the loop."""
        for entry in self.attached:
            if getattr(inspect.unwrap(entry.function.call), "__code__", None) is frame.f_code:
                mend = "await what it waits for" if entry.function.kind is RewardKind.ASYNC else "set [scoring] processes = 1 or more"
                return f"the reward {entry.name!r}, {place_of(frame)} ({mend})"
        return None
