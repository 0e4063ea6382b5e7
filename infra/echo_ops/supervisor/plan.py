"""Which processes a run consists of, and how each is started. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from echo_bus.settings import Settings
from echo_ops.supervisor.placement import Machine, Place, placement


class Role(StrEnum):
    """The roles that run as processes, in the order in which they are drained: whoever makes work first, whoever needs it last."""

    FEEDER = "feeder"
    WORKER = "worker"
    REWARD = "reward"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """One process: its command, what it adds to the environment, the cores it is bound to, and its files."""

    role: Role
    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: tuple[int, ...]
    log: Path
    announce: Path


# The slowest to get ready first: its imports are the critical path of a start.
_START_ORDER = (Role.WORKER, Role.LEARNER, Role.REWARD, Role.FEEDER)


def plan_children(
    settings: Settings, machine: Machine, *, config: Path | None, overrides: Mapping[str, str], folder: Path
) -> tuple[ChildPlan, ...]:
    """Every process of the run in the order in which they are started. `overrides` are settings as environment variables."""
    places = placement(
        machine,
        workers=settings.rollout.workers,
        ranks=settings.learner.ranks,
        gpus_per_worker=int(settings.rollout.options.get("tensor_parallel_size", 1)),
    )
    wanted: dict[Role, tuple[Place, ...]] = {
        Role.WORKER: places.workers,
        Role.LEARNER: (places.learner,),
        Role.REWARD: (places.others,) * settings.scoring.workers,
        # In sequential mode the learner asks for its own batches.
        Role.FEEDER: (places.others,) if settings.run.mode == "asynchronous" else (),
    }
    return tuple(
        _child(role, index, place, config=config, overrides=overrides, folder=folder)
        for role in _START_ORDER
        for index, place in enumerate(wanted[role])
    )


def _child(role: Role, index: int, place: Place, *, config: Path | None, overrides: Mapping[str, str], folder: Path) -> ChildPlan:
    is_numbered = role in {Role.WORKER, Role.REWARD}
    name = f"{role.value}-{index}" if is_numbered else role.value
    announce = folder / "processes" / f"{name}.json"
    command = [sys.executable, "-m", "echo_ops.cli", "run", role.value, "--announce", str(announce)]
    if is_numbered:
        command += ["--name", name]
    if config is not None:
        command += ["--config", str(config)]
    return ChildPlan(
        role=role,
        name=name,
        command=tuple(command),
        environ={**place.environ, **overrides},
        cores=place.cores,
        log=folder / "logs" / f"{name}.log",
        announce=announce,
    )
