"""The processes of a run, and how each is started. Pure."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echo_ops.roles import ROLES, Role
from echo_ops.supervisor.placement import Machine, ProcessPlacement, WorkerNeed, placement
from echo_rollout.engines.catalogue import is_elsewhere
from echo_settings import Settings
from echo_settings.kinds import kinds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """One process: its command, additions to the environment, the cores that it is bound to, and its files."""

    role: Role
    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: tuple[int, ...]
    log: Path
    announce: Path


def plan_children(
    settings: Settings,
    machine: Machine,
    *,
    config: Path | None,
    overrides: Mapping[str, str],
    folder: Path,
    learner_flags: Sequence[str] = (),
) -> tuple[ChildPlan, ...]:
    """Every process of the run in the order in which they are started. `overrides`: settings as environment variables; `learner_flags`:
    for `echoswarm run learner`.
    """
    workers = _workers(settings)
    places = placement(machine, [_need(kind) for _, kind in workers], ranks=settings.learner.ranks)
    is_asynchronous, is_logged = settings.run.mode == "asynchronous", bool(settings.offline.episodes)
    wanted: dict[Role, list[_Wanted]] = {
        Role.WORKER: _numbered(Role.WORKER, zip((name for name, _ in workers), places.workers, strict=True)),
        Role.LEARNER: [_Wanted(Role.LEARNER.value, places.learner)],
        Role.REWARD: _numbered(Role.REWARD, [("", places.others)] * settings.scoring.workers),
        # Exactly one process allocates the run's seqs; in sequential mode it is the learner.
        Role.FEEDER: [_Wanted(Role.FEEDER.value, places.others)] if is_asynchronous and not is_logged else [],
        Role.COORDINATOR: [_Wanted(Role.COORDINATOR.value, places.others)] if _has_pool(settings) and settings.coordinator.enabled else [],
        Role.OFFLINE: [_Wanted(Role.OFFLINE.value, places.others)] if is_logged else [],
    }
    plans = [_child(role, each, config=config, overrides=overrides, folder=folder) for role in ROLES for each in wanted[role]]
    return tuple(replace(plan, command=(*plan.command, *learner_flags)) if plan.role is Role.LEARNER else plan for plan in plans)


def signing_processes(settings: Settings) -> list[str]:
    """`role.name` of each process of `plan_children` that writes what [trust] signs."""
    workers = _names(Role.WORKER, [kind for kind, _ in _workers(settings)])
    rewards = _names(Role.REWARD, [""] * settings.scoring.workers)
    offline = [Role.OFFLINE.value] if settings.offline.episodes else []
    return [f"{Role.WORKER.value}.{name}" for name in workers] + [f"{Role.REWARD.value}.{name}" for name in rewards] + offline


def _workers(settings: Settings) -> list[tuple[str, Settings]]:
    """The kind of each worker, with its settings."""
    return [(name, kind) for name, kind in kinds_of(settings) for _ in range(kind.rollout.workers)]


def _has_pool(settings: Settings) -> bool:
    """Whether the run has more than one worker, or workers started elsewhere, whose number is unknown here."""
    numbers = [kind.rollout.workers for _, kind in kinds_of(settings)]
    return sum(numbers) > 1 or 0 in numbers


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One process to start: its name, its place, and its kind if it is a worker of a pool."""

    name: str
    place: ProcessPlacement
    kind: str = ""
    is_numbered: bool = False


def _numbered(role: Role, kinds: Iterable[tuple[str, ProcessPlacement]]) -> list[_Wanted]:
    """Numbered processes of a role, each of a kind and at a place."""
    wanted = list(kinds)
    names = _names(role, [kind for kind, _ in wanted])
    return [_Wanted(name, place, kind, is_numbered=True) for name, (kind, place) in zip(names, wanted, strict=True)]


def _names(role: Role, kinds: Sequence[str]) -> list[str]:
    """Role and number, or role, kind and number; each kind counts from 0."""
    counts: Counter[str] = Counter()
    names = []
    for kind in kinds:
        names.append("-".join([role.value, *([kind] if kind else []), str(counts[kind])]))
        counts[kind] += 1
    return names


def _need(settings: Settings) -> WorkerNeed:
    """What one worker of a kind needs of this machine."""
    options = settings.rollout.options
    num_devices = len(settings.rollout.devices) or int(options.get("tensor_parallel_size", 1))
    return WorkerNeed(gpus=0 if options.get("device") == "cpu" else num_devices, is_elsewhere=is_elsewhere(options))


def _child(role: Role, wanted: _Wanted, *, config: Path | None, overrides: Mapping[str, str], folder: Path) -> ChildPlan:
    name, place = wanted.name, wanted.place
    announce = folder / "processes" / f"{name}.json"
    command = [sys.executable, "-m", "echo_ops.cli", "run", role.value, "--announce", str(announce)]
    if wanted.is_numbered:
        command += ["--name", name]
    if wanted.kind:
        command += ["--kind", wanted.kind]
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
