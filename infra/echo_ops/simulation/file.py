"""The TOML file of a scenario. Sizes in GB and MB (10^9 and 10^6 bytes), lines in Mbit/s, times in seconds, prices per hour."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from echo_core.policy import Admission, OverBudget, StalenessPolicy
from echo_core.simulation.scenario import BatchOrder, Generation, Kind, PoolKind, PoolPlan, Route, Scenario, Weights
from echo_schemas.errors import UserError
from echo_settings.learner import StalenessSettings
from echo_settings.load import load_sections
from echo_settings.section import Section

_BYTES_PER_MBIT = 1e6 / 8
# More would take hours, and is probably a typing error.
_MOST_WORKERS = 100_000


class LearnerFile(Section):
    """[learner]: the time, size and price of a step."""

    train_s: float = Field(gt=0)
    """T_train: seconds of a step, without waiting."""
    spread: float = Field(default=0.0, ge=0, lt=1)
    """T_train varies uniformly within ± this share."""
    groups_per_step: int = Field(ge=1)
    """Prompts of a step."""
    group_size: int = Field(default=16, ge=1)
    """Samples of a prompt."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of all its machines together."""
    order: Literal["oldest_first", "newest_first"] = "oldest_first"
    """Which admissible groups a batch takes; EchoSwarm takes the oldest."""


class WeightsFile(Section):
    """[weights]: the size of a snapshot, and its way to the workers."""

    plan: Literal["chains", "star", "fixed"] = "chains"
    """`chains`: from worker to worker; `star`: each from the learner; `fixed`: all have it after broadcast_s."""
    broadcast_s: float = Field(default=0.0, ge=0)
    """With `fixed`: seconds from a publication until workers generate with it."""
    size_gb: float = Field(default=0.0, ge=0)
    """Size of one snapshot."""
    learner_mbit_s: float | None = Field(default=None, gt=0)
    """The learner's upload speed; none: no limit."""
    chunk_mb: float = Field(default=100.0, gt=0)
    """A worker passes a chunk on when it has the whole chunk."""
    chains: int | None = Field(default=None, ge=1)
    """Chains that share the workers; none: as many as the learner's line feeds at the fastest worker's speed."""
    stripes: int = Field(default=1, ge=1)
    """Parts of a snapshot that go through a chain's workers in different orders."""
    latency_s: float = Field(default=0.0, ge=0)
    """Seconds from one machine to the next."""
    load_s: float = Field(default=0.0, ge=0)
    """Seconds from the last byte to the first request under the new weights."""


class GenerationFile(Section):
    """[generation]: how long groups take, and whether workers generate while weights are on their way."""

    tail: float = Field(default=0.0, ge=0, le=3)
    """Sigma of the lognormal distribution of lengths; 0: all alike; 1: the longest of a hundred takes seven times the mean."""
    hardness: float = Field(default=0.6, ge=-1, le=1)
    """Correlation of a group's length with its difficulty."""
    score_s: float = Field(default=0.0, ge=0)
    """Seconds from a group's last token until the learner has its rewards; the worker goes on meanwhile."""
    on_old_weights: bool = True
    """Whether workers generate while newer weights are on their way; the paper's eq. 1 assumes false."""


class CoordinatorFile(Section):
    """[coordinator]: which workers take part."""

    rule: Literal["live", "everybody", "cheapest", "random", "anew"] = "live"
    """`live`: a run's coordinator; `cheapest`, `random`: chosen once; `anew`: the cheapest at each check; `everybody`: no coordinator."""
    every_s: float | None = Field(default=None, gt=0)
    """Seconds between two checks; none: half of train_s, and not below 5 s."""
    gamma: float = Field(default=1.1, ge=1)
    """Safety factor on the smallest rate that hides generation behind training."""
    hysteresis: float = Field(default=0.15, ge=0)
    """The surplus that must remain after a release, as a share of the target."""
    release_s: float = Field(default=30.0, ge=0)
    """How long a released worker goes on with its requests."""
    standby_kept: bool = False
    """Whether a released worker keeps its machine, and is paid, to be back at once."""


class WorkersFile(Section):
    """[[workers]]: the machines of one kind."""

    kind: str = Field(min_length=1)
    """The kind's name."""
    count: int = Field(ge=0)
    """Number of machines."""
    rate: float = Field(ge=0)
    """Rollouts per second of one of them, all its groups together, without waiting."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one of them."""
    mbit_s: float | None = Field(default=None, gt=0)
    """Speed of its line in each direction; none: no limit."""
    groups_at_once: int = Field(default=1, ge=1)
    """Groups that it generates at the same time."""
    joins_s: float = Field(default=0.0, ge=0)
    """Second at which it joins."""
    start_s: float = Field(default=0.0, ge=0)
    """Seconds from a new machine to a running engine."""
    failures_per_day: float = Field(default=0.0, ge=0)
    """How often it fails without notice."""
    repair_s: float = Field(default=3600.0, ge=0)
    """Mean seconds until it is back."""
    preemptions_per_day: float = Field(default=0.0, ge=0)
    """How often it is taken away."""
    away_s: float = Field(default=3600.0, ge=0)
    """Mean seconds until it is replaced."""
    notice_s: float = Field(default=30.0, ge=0)
    """Seconds of notice before that."""


class ScenarioFile(Section):
    """The whole file."""

    steps: int = Field(default=100, ge=1)
    """Counted steps."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps before the counted ones; none: two publication periods."""
    seed: int = 0
    """Seed of all random numbers."""
    learner: LearnerFile
    weights: WeightsFile = WeightsFile()
    staleness: StalenessSettings = StalenessSettings()
    generation: GenerationFile = GenerationFile()
    coordinator: CoordinatorFile = CoordinatorFile()
    workers: tuple[WorkersFile, ...] = Field(default=(), max_length=1000)


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file. Raises UserError, which says what to correct."""
    return scenario_of(load_sections(path, ScenarioFile))


def scenario_of(file: ScenarioFile) -> Scenario:
    """The scenario in the units of the simulation. Raises UserError for too many workers."""
    count = sum(each.count for each in file.workers)
    if count > _MOST_WORKERS:
        raise UserError(f"{count} workers are too many to simulate.", hint=f"Give at most {_MOST_WORKERS}.")
    learner, coordinator = file.learner, file.coordinator
    return Scenario(
        train_s=learner.train_s,
        train_spread=learner.spread,
        policy=_policy(file),
        weights=_weights(file.weights),
        kinds=[_kind(each) for each in file.workers],
        steps=file.steps,
        warmup_steps=file.warmup_steps,
        learner_price_per_hour=learner.price_per_hour,
        order=BatchOrder(learner.order),
        generation=Generation(**file.generation.model_dump()),
        pool=PoolPlan(kind=PoolKind(coordinator.rule), **coordinator.model_dump(exclude={"rule"})),
        seed=file.seed,
    )


def _policy(file: ScenarioFile) -> StalenessPolicy:
    staleness = file.staleness
    return StalenessPolicy(
        budget=staleness.budget,
        publication_period=staleness.publication_period or max(1, staleness.budget - 1),
        groups_per_step=file.learner.groups_per_step,
        group_size=file.learner.group_size,
        min_group_size=staleness.min_group_size,
        admission=Admission(staleness.admission),
        over_budget=OverBudget(staleness.over_budget),
        lead=staleness.lead,
    )


def _weights(file: WeightsFile) -> Weights:
    return Weights(
        route=Route(file.plan),
        num_bytes=file.size_gb * 1e9,
        learner_line=_line(file.learner_mbit_s),
        chunk_bytes=file.chunk_mb * 1e6,
        chains=file.chains,
        stripes=file.stripes,
        latency_s=file.latency_s,
        load_s=file.load_s,
        fixed_s=file.broadcast_s,
    )


def _kind(file: WorkersFile) -> Kind:
    rest = file.model_dump(exclude={"kind", "mbit_s"})
    return Kind(name=file.kind, line=_line(file.mbit_s), **rest)


def _line(mbit_s: float | None) -> float:
    return math.inf if mbit_s is None else mbit_s * _BYTES_PER_MBIT
