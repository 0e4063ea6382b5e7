"""The counters of a simulation, from the end of the warm-up on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from echo_core.simulation.machines import Group
from echo_core.simulation.outcome import Bias, Outcome, StepRecord


class Tally:
    def __init__(self, began_s: float = 0.0) -> None:
        self.began_s = began_s
        self.broadcasts_s: list[float] = []
        self.num_stale = self.num_redelivered = 0
        self._steps: list[StepRecord] = []
        self.num_orders: Counter[bool] = Counter()
        """By `is_active`: activations and releases."""
        self.asked = Means()
        """Of the groups issued for the first time."""
        self._trained = Means()

    def trained(self, step: StepRecord, groups: list[tuple[Group, float]]) -> None:
        """A step was trained on these groups, each with the weight of its loss."""
        self._steps.append(step)
        for group, weight in groups:
            self._trained.add(group, weight)

    def outcome(self, **figures: Any) -> Outcome:
        """The outcome. `figures`: those that the fleet has counted itself."""
        asked, trained = self.asked, self._trained
        has_both = asked.weight > 0 and trained.weight > 0
        return Outcome(
            steps=self._steps,
            broadcasts_s=self.broadcasts_s,
            num_activated=self.num_orders[True],
            num_released=self.num_orders[False],
            num_stale=self.num_stale,
            num_redelivered=self.num_redelivered,
            bias=Bias(length=trained.length / asked.length, difficulty=trained.difficulty / asked.difficulty) if has_both else Bias(),
            **figures,
        )


class Means:
    """Weighted means of groups' length and difficulty."""

    def __init__(self) -> None:
        self.weight = self._length = self._difficulty = 0.0

    def add(self, group: Group, weight: float = 1.0) -> None:
        self.weight += weight
        self._length += weight * group.length
        self._difficulty += weight * group.difficulty

    @property
    def length(self) -> float:
        return self._length / self.weight

    @property
    def difficulty(self) -> float:
        return self._difficulty / self.weight
