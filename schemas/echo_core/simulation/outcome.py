"""The result of a simulation, from the end of the warm-up on."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One trained step. `version`: of the learner when it formed the batch. `ages`: groups of the batch by staleness."""

    version: int
    began_s: float
    waited_s: float
    training_s: float
    ages: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The bias of the policy: means over trained groups / means over all requested groups. 1: no bias. If long groups become stale and are
    never trained, `length` is below 1."""

    length: float = 1.0
    difficulty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times in simulated seconds, money in the unit of the prices. Empty lists and infinite costs if nothing was trained."""

    wanted_steps: int
    steps: Sequence[StepRecord]
    seconds: float
    broadcasts_s: Sequence[float]
    rollouts_per_step: int
    cost: float
    cost_by_kind: Mapping[str, float] = field(default_factory=dict)
    """Of workers; the learner's is the rest of `cost`."""
    idle_cost: float = 0.0
    """Of paid workers without a group in hand."""
    mean_active: float = 0.0
    num_activated: int = 0
    num_released: int = 0
    num_stale: int = 0
    """Groups dropped because they were too old."""
    num_redelivered: int = 0
    bias: Bias = field(default_factory=Bias)

    @property
    def steps_per_s(self) -> float:
        """Trained steps per second."""
        return len(self.steps) / self.seconds if self.seconds else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Waiting / (waiting + training) of the learner; 1 if nothing was trained."""
        waited = math.fsum(step.waited_s for step in self.steps)
        trained = math.fsum(step.training_s for step in self.steps)
        return waited / (waited + trained) if trained else 1.0

    @property
    def staleness(self) -> tuple[int, ...]:
        """Entry i counts the groups that were i versions old in their batch."""
        ages: Counter[int] = Counter()
        for step in self.steps:
            ages.update(step.ages)
        return tuple(ages[age] for age in range(max(ages, default=-1) + 1))

    @property
    def staleness_mean(self) -> float:
        """Of trained groups."""
        counts = self.staleness
        return sum(age * count for age, count in enumerate(counts)) / sum(counts) if sum(counts) else 0.0

    @property
    def staleness_max(self) -> int:
        """Of trained groups."""
        return max(len(self.staleness) - 1, 0)

    @property
    def broadcast_s(self) -> float | None:
        """Median T_bcast; None if no snapshot was published."""
        return statistics.median(self.broadcasts_s) if self.broadcasts_s else None

    def wait_s(self, publication_period: int) -> float:
        """Mean seconds that the learner waits in a publication period."""
        if not self.steps:
            return math.inf
        return publication_period * math.fsum(step.waited_s for step in self.steps) / len(self.steps)

    @property
    def cost_per_step(self) -> float:
        """Workers and learner."""
        return self.cost / len(self.steps) if self.steps else math.inf

    @property
    def stale_share(self) -> float:
        """Share of dropped groups among trained and dropped ones."""
        decided = sum(self.staleness) + self.num_stale
        return self.num_stale / decided if decided else 0.0
