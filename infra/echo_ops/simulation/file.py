"""The TOML file of a scenario. Sizes in GB and MB (10^9 and 10^6 bytes), lines in Mbit/s, times in seconds, prices per hour."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from echo_core.policy import Admission, OverBudget, StalenessPolicy
from echo_core.simulation.scenario import BatchOrder, Generation, Kind, PoolKind, PoolPlan, Route, Scenario, Weights
from echo_schemas.errors import UserError
from echo_settings.load import load_sections
from echo_settings.section import Section
from echo_settings.sections import StalenessSettings

_BYTES_PER_MBIT = 1e6 / 8
# More would take hours, and is a slip of the finger.
_MOST_WORKERS = 100_000


class LearnerFile(Section):
    """[learner]: what a step takes and needs."""

    train_s: float = Field(gt=0)
    """T_train: seconds of a step, without waiting."""
    spread: float = Field(default=0.0, ge=0, lt=1)
    """T_train varies uniformly within ± this share."""
    groups_per_step: int = Field(ge=1)
    """Prompts of a step."""
    group_size: int = Field(default=16, ge=1)
    """Samples of a prompt."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of all its machines together."""
    order: Literal["oldest_first", "newest_first"] = "oldest_first"
    """Which admissible groups a batch takes; EchoSwarm takes the oldest."""


class WeightsFile(Section):
    """[weights]: how large a snapshot is, and how it gets to the workers."""

    plan: Literal["chains", "star", "fixed"] = "chains"
    """`chains`: from worker to worker; `star`: each from the learner; `fixed`: everybody has it after broadcast_s."""
    broadcast_s: float = Field(default=0.0, ge=0)
    """With `fixed`: seconds from a publication until workers generate with it."""
    size_gb: float = Field(default=0.0, ge=0)
    """Of one snapshot."""
    learner_mbit_s: float | None = Field(default=None, gt=0)
    """What the learner can send; none: no limit."""
    chunk_mb: float = Field(default=100.0, gt=0)
    """A worker hands a chunk on when it has all of it."""
    chains: int | None = Field(default=None, ge=1)
    """Chains that share the workers; none: as many as the learner's line feeds at the fastest worker's speed."""
    stripes: int = Field(default=1, ge=1)
    """Parts of a snapshot that go through a chain's workers in different orders."""
    latency_s: float = Field(default=0.0, ge=0)
    """From one machine to the next."""
    load_s: float = Field(default=0.0, ge=0)
    """From the last byte to the first request under the new weights."""


class GenerationFile(Section):
    """[generation]: how long groups take, and what goes on while weights travel."""

    tail: float = Field(default=0.0, ge=0, le=3)
    """Sigma of the lognormal distribution of lengths; 0: all alike; 1: the longest of a hundred takes seven times the mean."""
    hardness: float = Field(default=0.6, ge=-1, le=1)
    """Correlation of a group's length with its difficulty."""
    score_s: float = Field(default=0.0, ge=0)
    """From a group's last token until the learner has its rewards; the worker goes on meanwhile."""
    on_old_weights: bool = True
    """Whether workers generate while newer weights are on their way; false is what the paper's eq. 1 takes for granted."""


class CoordinatorFile(Section):
    """[coordinator]: who takes part."""

    rule: Literal["live", "everybody", "cheapest", "random", "anew"] = "live"
    """`live`: a run's coordinator; `cheapest`, `random`: chosen once; `anew`: the cheapest at each look; `everybody`: no coordinator."""
    every_s: float | None = Field(default=None, gt=0)
    """Seconds between two looks; none: half of train_s, and not below 5 s."""
    gamma: float = Field(default=1.1, ge=1)
    """Safety factor on the smallest rate that hides generation behind training."""
    hysteresis: float = Field(default=0.15, ge=0)
    """What a release must leave above the target, as a share of it."""
    release_s: float = Field(default=30.0, ge=0)
    """How long a worker that is released goes on with what it has in hand."""
    standby_kept: bool = False
    """Whether a released worker keeps its machine, and is paid, to be back at once."""


class WorkersFile(Section):
    """[[workers]]: the machines of one kind."""

    kind: str = Field(min_length=1)
    """Its name."""
    count: int = Field(ge=0)
    """How many there are."""
    rate: float = Field(ge=0)
    """Rollouts per second of one of them, all its groups together, without waiting."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of one of them."""
    mbit_s: float | None = Field(default=None, gt=0)
    """Its line, down and up each; none: no limit."""
    groups_at_once: int = Field(default=1, ge=1)
    """Groups that it generates side by side."""
    joins_s: float = Field(default=0.0, ge=0)
    """When it comes."""
    start_s: float = Field(default=0.0, ge=0)
    """From a machine that is there to an engine that runs."""
    failures_per_day: float = Field(default=0.0, ge=0)
    """How often it dies, without a word."""
    repair_s: float = Field(default=3600.0, ge=0)
    """Mean time until it is back."""
    preemptions_per_day: float = Field(default=0.0, ge=0)
    """How often it is taken away."""
    away_s: float = Field(default=3600.0, ge=0)
    """Mean time until there is another."""
    notice_s: float = Field(default=30.0, ge=0)
    """How long before it is told so."""


class ScenarioFile(Section):
    """The whole file."""

    steps: int = Field(default=100, ge=1)
    """Steps that are counted."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps before them; none: two publication periods."""
    seed: int = 0
    """Of all that is drawn."""
    learner: LearnerFile
    weights: WeightsFile = WeightsFile()
    staleness: StalenessSettings = StalenessSettings()
    generation: GenerationFile = GenerationFile()
    coordinator: CoordinatorFile = CoordinatorFile()
    workers: tuple[WorkersFile, ...] = Field(default=(), max_length=1000)


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file. Raises UserError, naming what to mend."""
    return scenario_of(load_sections(path, ScenarioFile))


def scenario_of(file: ScenarioFile) -> Scenario:
    """In the units of the simulation. Raises UserError for what cannot be simulated."""
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
        pool=PoolPlan(
            kind=PoolKind(coordinator.rule),
            every_s=coordinator.every_s,
            gamma=coordinator.gamma,
            hysteresis=coordinator.hysteresis,
            release_s=coordinator.release_s,
            standby_kept=coordinator.standby_kept,
        ),
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
