"""The input of a simulation: learner, weights, generation, workers by kind. Times in seconds, lines in bytes per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from echo_core.capacity.activation import Candidate
from echo_core.capacity.overlap import GAMMA
from echo_core.policy import StalenessPolicy
from echo_schemas.errors import UserError

SECONDS_PER_DAY = 86_400.0


class BatchOrder(StrEnum):
    """The order in which a batch takes admissible groups."""

    NEWEST_FIRST = "newest_first"
    """The assumption of the paper's bound."""
    OLDEST_FIRST = "oldest_first"
    """As in EchoSwarm: fewer groups become too old."""


class Route(StrEnum):
    """The way of a snapshot to the workers."""

    CHAINS = "chains"
    STAR = "star"
    FIXED = "fixed"
    """Each worker has it after the same time, `fixed_s`."""


class PoolKind(StrEnum):
    """The rule that chooses the active workers."""

    LIVE = "live"
    """The coordinator's rule, looking every `every_s`."""
    EVERYBODY = "everybody"
    CHEAPEST = "cheapest"
    """The workers of a plan, from the start to the end."""
    RANDOM = "random"
    """At random until the rate is reached, from the start to the end (the paper's "w/o Cost")."""
    ANEW = "anew"
    """The cheapest workers, chosen anew at each look: no hysteresis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Workers of one kind. `rate`: rollouts/s of one worker, all its groups together, without waiting."""

    name: str
    count: int
    rate: float
    price_per_hour: float = 0.0
    line: float = math.inf
    """Bytes per second, down and up each."""
    groups_at_once: int = 1
    joins_s: float = 0.0
    start_s: float = 0.0
    """From the machine's start to an engine that takes requests."""
    failures_per_day: float = 0.0
    repair_s: float = 3600.0
    preemptions_per_day: float = 0.0
    away_s: float = 3600.0
    notice_s: float = 30.0
    """Warning time of a preemption; a failure comes without warning."""

    def __post_init__(self) -> None:
        checked = (self.rate, self.price_per_hour, self.joins_s, self.start_s, self.repair_s, self.away_s, self.notice_s)
        if min(*checked, self.failures_per_day, self.preemptions_per_day) < 0 or self.count < 0 or self.groups_at_once < 1:
            raise UserError(
                f"Workers of kind {self.name!r} have a negative number, or no group at once.",
                hint="Give numbers of at least 0, and groups_at_once of at least 1.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A snapshot and its way. `chains`: chains that share the workers; None: as many as the learner's line feeds at full speed."""

    route: Route
    num_bytes: float = 0.0
    learner_line: float = math.inf
    chunk_bytes: float = 1e8
    chains: int | None = None
    stripes: int = 1
    latency_s: float = 0.0
    load_s: float = 0.0
    """From the last byte to the first request under the new weights."""
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if self.route is not Route.FIXED and (self.num_bytes <= 0 or self.chunk_bytes <= 0 or self.learner_line <= 0):
            raise UserError(
                "The weights have no size, or the learner no line to send them by.",
                hint='Give size_gb, chunk_mb and learner_mbit_s above 0, or plan = "fixed" and broadcast_s.',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """`tail`: sigma of the lognormal distribution of a group's length, whose mean is 1; 0: all equal. `hardness`: correlation of a group's
    length with its difficulty, which is uniform in [0, 1]. `on_old_weights` False: workers generate nothing while newer weights are on
    their way, as the paper's eq. 1 assumes. `score_s`: from a group's last token until the learner has its rewards."""

    tail: float = 0.0
    hardness: float = 0.6
    on_old_weights: bool = True
    score_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.tail, self.score_s) < 0 or not -1 <= self.hardness <= 1:
            raise UserError(
                "A tail and a time are not negative, and a correlation lies between -1 and 1.", hint="Give tail = 0 for lengths all alike."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The choice of active workers, and the state of the others. `standby_kept`: a worker on standby stays paid, follows the weights and
    can work at once; else its machine is returned, and comes back as a new one."""

    kind: PoolKind = PoolKind.LIVE
    every_s: float | None = None
    """Between two looks; None: half of T_train, and not below 5 s."""
    gamma: float = GAMMA
    hysteresis: float = 0.15
    release_s: float = 30.0
    standby_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation. Raises UserError for a scenario that cannot run, such as one without workers."""

    train_s: float
    policy: StalenessPolicy
    weights: Weights
    kinds: Sequence[Kind]
    steps: int = 100
    warmup_steps: int | None = None
    """Trained before anything is counted; None: two publication periods."""
    train_spread: float = 0.0
    """Of T_train: uniform within ± this share."""
    learner_price_per_hour: float = 0.0
    order: BatchOrder = BatchOrder.OLDEST_FIRST
    generation: Generation = field(default_factory=Generation)
    pool: PoolPlan = field(default_factory=PoolPlan)
    heartbeat_s: float = 1.0
    redelivery_s: float = 10.0
    """Until the consumer group gives a dead worker's requests to others: its session time-out."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.train_s > 0 or self.steps < 1:
            raise UserError(
                "A simulation needs at least one step that takes some time.", hint="Give train_s above 0 and steps of at least 1."
            )
        if not any(kind.count and kind.rate > 0 for kind in self.kinds):
            raise UserError(
                "Nobody generates: the pool is empty, or no worker has a rate.", hint="Add [[workers]] with count and rate above 0."
            )
        names = [kind.name for kind in self.kinds]
        if len(set(names)) < len(names):
            raise UserError("Two kinds of workers have one name.", hint="Give each [[workers]] a name of its own.")

    @property
    def every_s(self) -> float:
        """Seconds between two looks."""
        return max(5.0, self.train_s / 2) if self.pool.every_s is None else self.pool.every_s

    @property
    def num_warmup(self) -> int:
        """Steps before the first that counts."""
        return 2 * self.policy.publication_period if self.warmup_steps is None else self.warmup_steps

    def candidates(self) -> list[Candidate]:
        """All workers, as candidates of a plan."""
        return [
            Candidate(worker_id=f"{kind.name}-{number}", kind=kind.name, rate=kind.rate, price_per_hour=kind.price_per_hour)
            for kind in self.kinds
            for number in range(kind.count)
        ]
