"""The reward role: reads trajectories and writes rewards until it is stopped.

Threads: `run_reward` runs an event loop on the caller's thread; a view of the learner's progress reads on its own thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing

from echo_bus.bus import Bus
from echo_bus.client.kafka_errors import translated
from echo_runtime.process import RoleProcess
from echo_schemas.errors import UserError
from echo_schemas.records import Record
from echo_schemas.topics import OWN_APPLICATION, PROGRESS, REWARDS, TRAJECTORIES, attachment_key
from echo_settings import Settings
from echo_settings.rules import evaluation_specs
from echo_streams.application_run import ApplicationOptions, ApplicationRun
from echo_streams.attachment import end_when_detached
from echo_streams.beginning import offsets_of, parse_beginning, place_group
from echo_streams.scoring import Attached, RewardChoice
from echo_tasks.catalogue import load_reward

logger = logging.getLogger(__name__)
_ASK_S = 15.0


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

    `application`: its name; processes of the same name share a consumer group, and so the work. None: the run's own. `names`: the rewards
    of an application beside it; None: all of [rewards], and of each [[eval]]. Only for an application beside the run's own: `beginning`,
    where its group begins (`parse_beginning`; empty: at its committed offsets, a new group at the beginning of the log); `share` of the
    groups that it scores; `ends_with_run`. Raises UserError for an unknown reward or a missing topic, NotAuthorized for a group that the
    login may not join, TooManyDeadLetters after [dead_letters] stop_after unreadable trajectories in a row.
    """
    is_own = application in {None, OWN_APPLICATION}
    options = ApplicationOptions(beginning=beginning, share=share, ends_with_run=ends_with_run)
    if is_own and (names or options != ApplicationOptions()):
        raise UserError(
            "Rewards, a beginning or a share of its own need an application of its own: the run's shares its trajectories among processes "
            "with the same rewards.",
            hint="Add --application with a new name.",
        )
    begins = parse_beginning(beginning) if beginning else None
    choice = None if names else choice_of(process.settings)
    attached = attach(names or all_rewards(process.settings))
    check_isolation(attached, process.settings.scoring.processes)
    num_partitions = check_topics(process.bus)
    name = application or OWN_APPLICATION
    group = process.bus.namespace.group("reward", name)
    if begins is not None:
        place_group(process.bus, group, offsets_of(process.bus, begins))
    logger.info("Rewards %s for %s, as the group %s", ", ".join(entry.name for entry in attached), process.settings.run.name, group)
    with (
        closing(process.bus.view(PROGRESS, Record)) as progress,
        closing(process.bus.orders()) as orders,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        if not is_own:
            end_when_detached(orders, attachment_key(process.settings.run.name, name), process.stop, _born_ms(process))
        application_run = ApplicationRun(
            process=process,
            name=name,
            group=group,
            attached=attached,
            choice=choice,
            options=options,
            progress=progress,
            num_partitions=num_partitions,
        )
        runner.run(application_run.serve())


def _born_ms(process: RoleProcess) -> int:
    """When this process was started, Unix ms; now, where the system does not say."""
    born_s = process.registry.get_sample_value("process_start_time_seconds")
    return process.clock.time_ms() if born_s is None else int(born_s * 1000)


def all_rewards(settings: Settings) -> tuple[str, ...]:
    """The rewards of the run, then those that only evaluations have."""
    return tuple(dict.fromkeys([*settings.rewards, *(name for spec in evaluation_specs(settings) for name in spec.rewards)]))


def choice_of(settings: Settings) -> RewardChoice | None:
    """The rewards of each purpose; None if all purposes have the same."""
    run = frozenset(settings.rewards)
    evaluations = {spec.name: frozenset(spec.rewards) for spec in evaluation_specs(settings)}
    return None if all(names == run for names in evaluations.values()) else RewardChoice(run=run, evaluations=evaluations)


def attach(names: Sequence[str]) -> tuple[Attached, ...]:
    """The functions of `names`. Raises UserError if there are none, or one is unknown."""
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


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a tenth less CPU (measured)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[return-value]  # a function that makes a loop, as the type does


def check_topics(bus: Bus) -> int:
    """The number of partitions of `trajectories`. Raises UserError if a topic is missing, for which Faust's own client would wait silently,
    or `rewards` has fewer partitions.

    Raises ClusterUnreachable or NotAuthorized.
    """
    space = bus.namespace
    trajectories, rewards, letters = space.topic(TRAJECTORIES), space.topic(REWARDS), space.dead_letters(TRAJECTORIES)
    admin = bus.cluster.admin()
    with translated(f"the cluster of {space.name!r}"):
        found = admin.list_topics(timeout=_ASK_S).topics
    missing = [topic for topic in (trajectories, rewards, letters) if topic not in found or found[topic].error is not None]
    if missing:
        raise UserError(
            f"The reward application cannot see the topics {', '.join(missing)}.",
            hint="Run `echoswarm topics apply`; if they exist, compare the rights with `echoswarm acls render`.",
        )
    num_read, num_written = len(found[trajectories].partitions), len(found[rewards].partitions)
    if num_written < num_read:
        raise UserError(
            f"{rewards} has {num_written} partitions and {trajectories} {num_read}: a reward lies on its trajectory's partition.",
            hint=f"Give {rewards} {num_read} partitions.",
        )
    return num_read
