"""The reward role: trajectories in, rewards out, until told to stop.

Threads: `run_reward` runs an event loop on the thread that calls it; a view of the learner's progress reads on one of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from types import FrameType

from echo_bus.dead_letters import DeadLetterBudget
from echo_bus.reading.view import CompactedView
from echo_runtime.loop_watch import PLACE, LoopWatch, place_of
from echo_runtime.notices import Notices
from echo_runtime.process import RoleProcess
from echo_schemas.errors import UserError
from echo_schemas.records import MissingRewards, Progress
from echo_schemas.topics import PROGRESS, TRAJECTORIES, attachment_key, missing_rewards_key
from echo_settings import Settings
from echo_settings.rules import evaluation_specs
from echo_streams.attachment import RunEnd, end_when_detached
from echo_streams.beginning import offsets_of, parse_beginning, place_group
from echo_streams.intake import Intake
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import ScoringPool
from echo_streams.preflight import check_group, check_topics
from echo_streams.processing import Processor, Wire
from echo_streams.scoring import Attached, Scorer, ScoringLimits, Selection
from echo_streams.second_look import LookingParts, SecondLook, read_again
from echo_streams.security import login_of
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import RewardKind

logger = logging.getLogger(__name__)


# Of the time that the process has to end in: it scores what was read. Faust takes more than a second to stop.
_FINISH_SHARE = 0.4
OWN_APPLICATION = "main"
"""The application that every run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How an application beside the run's own reads; the same words as `run_reward`'s."""

    beginning: str = ""
    share: float = 1.0
    ends_with_run: bool = False


def run_reward(
    process: RoleProcess,
    *,
    application: str | None = None,
    names: Sequence[str] | None = None,
    beginning: str = "",
    share: float = 1.0,
    ends_with_run: bool = False,
) -> None:
    """Score every trajectory of the run until `process.stop`, or until an application beside the run's own is detached (`control`).

    `application`: which one this is; processes of the same one share its consumer group, and so the work. None: the run's own. `names`:
    the rewards of another one; None: all of [rewards], and of each [[eval]]. Only for an application beside the run's own: `beginning`,
    where its group begins (`parse_beginning`; empty: where it was, a new one at the beginning of the log); `share`, of the groups, how many
    it scores; `ends_with_run`, it ends when the run is over. Raises UserError for a reward or topic that is not there, NotAuthorized for a
    group that is closed to us, TooManyDeadLetters after [dead_letters] stop_after unreadable trajectories in a row.
    """
    is_own = application in {None, OWN_APPLICATION}
    beside = Beside(beginning=beginning, share=share, ends_with_run=ends_with_run)
    if is_own and (names or beside != Beside()):
        raise UserError(
            "Rewards, a beginning or a share of its own need an application of its own: the run's shares its trajectories among processes "
            "with the same rewards.",
            hint="Add --application with a new name.",
        )
    begins = parse_beginning(beginning) if beginning else None
    selection = None if names else selection_of(process.settings)
    attached = attach(names or all_rewards(process.settings))
    check_isolation(attached, process.settings.scoring.processes)
    num_partitions = check_topics(process.bus)
    name = application or OWN_APPLICATION
    group = process.bus.namespace.group("reward", name)
    check_group(process.bus.cluster, group)
    if begins is not None:
        place_group(process.bus, group, offsets_of(process.bus, begins))
    logger.info("Rewards %s for %s, as the group %s", ", ".join(entry.name for entry in attached), process.settings.run.name, group)
    with (
        closing(process.bus.view(PROGRESS, Progress)) as progress,
        closing(process.bus.view(PROGRESS, MissingRewards)) as missing,
        closing(process.bus.orders()) as orders,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        if not is_own:
            end_when_detached(orders, attachment_key(process.settings.run.name, name), process.stop)
        runner.run(_run(process, name, attached, selection, beside, progress, missing, group, num_partitions))


def all_rewards(settings: Settings) -> tuple[str, ...]:
    """The rewards of the run, then those that only evaluations name."""
    return tuple(dict.fromkeys([*settings.rewards, *(name for spec in evaluation_specs(settings) for name in spec.rewards)]))


def selection_of(settings: Settings) -> Selection | None:
    """Which of them judge what; None if there is nothing to choose."""
    run = frozenset(settings.rewards)
    evaluations = {spec.name: frozenset(spec.rewards) for spec in evaluation_specs(settings)}
    return None if all(names == run for names in evaluations.values()) else Selection(run=run, evaluations=evaluations)


def attach(names: Sequence[str]) -> tuple[Attached, ...]:
    """The functions of these names. Raises UserError if there are none, or one is unknown."""
    if not names:
        raise UserError(
            "The reward application has nothing to do: no reward is named.", hint="Name one in [rewards], for example exact = 1.0."
        )
    return tuple(Attached(name=name, function=load_reward(name)) for name in names)


def check_isolation(attached: Sequence[Attached], num_processes: int) -> None:
    """Raises UserError if a function needs a process of its own and there are none."""
    for entry in attached:
        if entry.function.isolated and num_processes == 0:
            raise UserError(
                f"The reward {entry.name!r} computes what a model wrote, so it needs processes that can be ended when they hang.",
                hint="Set [scoring] processes = 1, or more if scoring may use more cores.",
            )


async def _run(
    process: RoleProcess,
    application: str,
    attached: tuple[Attached, ...],
    selection: Selection | None,
    beside: Beside,
    progress: CompactedView[Progress],
    missing: CompactedView[MissingRewards],
    group: str,
    num_partitions: int,
) -> None:
    # Faust takes seconds to import, and the checks before should not wait for it.
    from echo_streams.faust_app import AppOptions, RewardApp

    settings, bus = process.settings, process.bus
    metrics = StreamsMetrics(process.registry)
    pool = _pool(settings, attached, metrics, process.notices)
    wire = Wire(
        namespace=bus.namespace,
        codec=bus.codec,
        run_id=settings.run.name,
        group=group,
        client_id=bus.client_id,
        clock=process.clock,
    )
    scoring = settings.scoring
    limits = ScoringLimits(timeout_s=scoring.timeout_s, retries=scoring.retries, concurrency=scoring.concurrency)
    scorer = Scorer(
        attached,
        run_id=wire.run_id,
        limits=limits,
        metrics=metrics,
        clock=process.clock,
        pool=pool,
        selection=selection,
        application=application,
        notices=process.notices,
    )
    intake = Intake(
        wire.run_id,
        budget=settings.budget,
        drop_stale=settings.staleness.over_budget == "drop",
        share=beside.share,
        live_from_ms=process.clock.time_ms() if beside.beginning else 0,
    )

    def learner_version() -> int | None:
        latest = progress.get(wire.run_id)
        return None if latest is None else latest.version

    budget = DeadLetterBudget(bus.dead_letter_limits, process.clock)
    processor = Processor(wire, scorer, intake, learner_version=learner_version, metrics=metrics, bus_metrics=bus.metrics, budget=budget)
    processor.set_num_partitions({bus.namespace.topic(TRAJECTORIES): num_partitions})
    options = AppOptions(
        group=group,
        client_id=bus.client_id,
        bootstrap=bus.cluster.bootstrap,  # type: ignore[attr-defined]  # Faust speaks to real clusters only
        topic=bus.namespace.topic(TRAJECTORIES),
        login=login_of(settings.kafka.client),
        inline=pool is None and all(entry.function.kind is not RewardKind.ASYNC for entry in attached),
        gather=settings.run.mode != "sequential",
        drain_s=_FINISH_SHARE * settings.run.drain_s,
    )
    watch = LoopWatch(process.notices, process.clock, name=lambda frame: _reward_at(frame, attached))
    process.health_checks[PLACE] = watch.check
    beside_it: list[asyncio.Task[None]] = []
    try:
        watch.start()
        if pool is not None:
            await pool.start()
        app = RewardApp(options, processor.process, metrics=metrics, places=process.places, clock=process.clock)
        looking = SecondLook(
            LookingParts(
                names=frozenset(entry.name for entry in attached),
                missing=lambda: missing.get(missing_rewards_key(wire.run_id)),
                committed=app.committed,
                read=lambda places: read_again(bus, places),
                judge=processor.judge_again,
                send=app.send,
                clock=process.clock,
            )
        )
        beside_it.append(asyncio.create_task(looking.run(), name="second look"))
        if beside.ends_with_run:
            end = RunEnd(lambda: progress.get(wire.run_id), lambda: app.num_done, process.clock)
            beside_it.append(asyncio.create_task(end.watch(process.stop), name="end of the run"))
        process.ready_checks["reward"] = lambda: None if app.joined else f"The group {group} is not joined yet."
        await app.run(process.stop)
    finally:
        watch.close()
        for task in beside_it:
            task.cancel()
        if pool is not None:
            pool.close()


def _reward_at(frame: FrameType, attached: tuple[Attached, ...]) -> str | None:
    """Which reward function a frame belongs to, and what to do about one that holds the loop up."""
    for entry in attached:
        if getattr(inspect.unwrap(entry.function.call), "__code__", None) is frame.f_code:
            mend = "await what it waits for" if entry.function.kind is RewardKind.ASYNC else "set [scoring] processes = 1 or more"
            return f"the reward {entry.name!r}, {place_of(frame)} ({mend})"
    return None


def _pool(settings: Settings, attached: tuple[Attached, ...], metrics: StreamsMetrics, notices: Notices) -> ScoringPool | None:
    functions = [entry.function for entry in attached if entry.function.kind is not RewardKind.ASYNC]
    if settings.scoring.processes == 0 or not functions:
        return None
    scoring = settings.scoring
    return ScoringPool(functions, num_processes=scoring.processes, metrics=metrics, memory_mb=scoring.memory_mb, notices=notices)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a tenth less CPU (measured)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[return-value]  # a function that makes a loop, as the type does
