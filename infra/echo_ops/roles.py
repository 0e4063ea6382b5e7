"""The roles that run as processes: the code of each, its flags, and the order of their start. The command line and the supervisor use this
declaration; the rights of each role on the cluster are in roles.yaml and the topic files.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_schemas.errors import UserError
from echo_schemas.libraries import library_missing

if TYPE_CHECKING:
    from echo_settings import Settings


class Role(StrEnum):
    """In the order of the work: requests, samples, rewards, training."""

    FEEDER = "feeder"
    COORDINATOR = "coordinator"
    OFFLINE = "offline"
    WORKER = "worker"
    REWARD = "reward"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The options of `echoswarm run ROLE` that only some roles take."""

    kind: Annotated[str, typer.Option(help="worker: which [[rollout.pool]] of the file it is.")] = ""
    episodes: Annotated[Path | None, typer.Option(help="offline: the file of episodes, in place of [offline] episodes.")] = None
    takeover: Annotated[bool, typer.Option("--takeover", help="learner: take the run over from a process that does not answer.")] = False
    skip: Annotated[bool, typer.Option("--skip", help="learner: drop the seqs whose records the log has lost, and go on.")] = False
    application: Annotated[
        str | None, typer.Option(help="reward: the name of an application beside the run's own; processes of one name share its work.")
    ] = None
    names: Annotated[
        list[str] | None,
        typer.Option("--reward", help="reward, with --application: score with this one, not with all of the file. Repeatable."),
    ] = None
    beginning: Annotated[
        str, typer.Option("--from", help="reward, with --application: where its group begins, instead of at its committed offsets.")
    ] = ""
    share: Annotated[float, typer.Option("--sample", min=0.0, max=1.0, help="reward, with --application: share of the groups.")] = 1.0
    ends_with_run: Annotated[
        bool, typer.Option("--ends-with-run", help="reward, with --application: end two minutes after the run has.")
    ] = False


_OPTIONS = {each.name: f"--{each.name.replace('_', '-')}" for each in fields(Flags)} | {
    "names": "--reward",
    "beginning": "--from",
    "share": "--sample",
}


@dataclass(frozen=True, slots=True)
class RoleEntry:
    """A role's module and function, the extra with its libraries, the flags that it takes, and how its libraries are imported early.

    `allocates`: it fences its predecessor and writes records that other roles act on, so a learner must have accepted the run first.
    """

    module: str
    function: str
    extra: str
    takes: tuple[str, ...] = ()
    prefetch: Callable[[Settings], None] = lambda settings: None
    allocates: bool = False

    def load(self, settings: Settings) -> Callable[..., None]:
        """The role's function, after the import of its heavy libraries. Raises UserError if one is not installed."""
        try:
            self.prefetch(settings)
            function: Callable[..., None] = getattr(importlib.import_module(self.module), self.function)
        except ModuleNotFoundError as exc:
            raise library_missing("This role", exc.name, f"'echoswarm[{self.extra}]'") from exc
        return function


def _prefetch_engine(settings: Settings) -> None:
    from echo_rollout.engines.catalogue import prefetch

    prefetch(settings.rollout.engine)


def _prefetch_faust(settings: Settings) -> None:
    """Import it while the learner starts, which a reward process of `echoswarm up` waits for."""
    del settings
    importlib.import_module("echo_streams.faust_app")


# In the order in which `up` starts them: the slowest first, since its imports are the critical path.
ROLES: Mapping[Role, RoleEntry] = {
    Role.WORKER: RoleEntry("echo_rollout.run", "run_worker", "rollout", ("kind",), _prefetch_engine),
    Role.LEARNER: RoleEntry("echo_learner.run", "run_learner", "learner", ("takeover", "skip")),
    Role.REWARD: RoleEntry(
        "echo_streams.run", "run_reward", "streams", ("application", "names", "beginning", "share", "ends_with_run"), _prefetch_faust
    ),
    Role.FEEDER: RoleEntry("echo_rollout.run", "run_feeder", "rollout", allocates=True),
    Role.COORDINATOR: RoleEntry("echo_streams.coordinator.run", "run_coordinator", "streams", allocates=True),
    Role.OFFLINE: RoleEntry("echo_rollout.offline.run", "run_offline", "rollout", ("episodes",), allocates=True),
}


def arguments_of(role: Role, flags: Flags) -> dict[str, Any]:
    """The flags that `role` takes, for its function. Raises UserError for a given flag that it does not take."""
    takes, nothing = ROLES[role].takes, Flags()
    for name, option in _OPTIONS.items():
        if name not in takes and getattr(flags, name) != getattr(nothing, name):
            (whose,) = (other.value for other, entry in ROLES.items() if name in entry.takes)
            raise UserError(f"`echoswarm run {role.value}` takes no {option}.", hint=f"It belongs to `echoswarm run {whose}`.")
    return {name: getattr(flags, name) for name in takes}
