"""What a simulation counts, from the end of the warm-up on."""

from __future__ import annotations

from typing import Any

from echo_core.simulation.machines import Group
from echo_core.simulation.outcome import Bias, Outcome, StepRecord


class Tally:
    """Counts of one simulation."""

    def __init__(self, began_s: float = 0.0) -> None:
        self.began_s = began_s
        self.broadcasts_s: list[float] = []
        self.num_stale = self.num_redelivered = 0
        self._steps: list[StepRecord] = []
        self._num_activated = self._num_released = 0
        self._asked, self._trained = _Means(), _Means()

    def asked(self, group: Group) -> None:
        """A group was issued for the first time."""
        self._asked.add(group, 1.0)

    def trained(self, step: StepRecord, groups: list[tuple[Group, float]]) -> None:
        """A step was trained on these groups, each with the weight of its loss."""
        self._steps.append(step)
        for group, weight in groups:
            self._trained.add(group, weight)

    def ordered(self, *, is_active: bool) -> None:
        """A worker was activated or released."""
        if is_active:
            self._num_activated += 1
        else:
            self._num_released += 1

    def outcome(self, **figures: Any) -> Outcome:
        """With what the fleet has counted itself."""
        asked, trained = self._asked, self._trained
        has_both = asked.weight > 0 and trained.weight > 0
        return Outcome(
            steps=self._steps,
            broadcasts_s=self.broadcasts_s,
            num_activated=self._num_activated,
            num_released=self._num_released,
            num_stale=self.num_stale,
            num_redelivered=self.num_redelivered,
            bias=Bias(length=trained.length / asked.length, difficulty=trained.difficulty / asked.difficulty) if has_both else Bias(),
            **figures,
        )


class _Means:
    """Weighted means of groups' length and difficulty."""

    def __init__(self) -> None:
        self.weight = self._length = self._difficulty = 0.0

    def add(self, group: Group, weight: float) -> None:
        """One group."""
        self.weight += weight
        self._length += weight * group.length
        self._difficulty += weight * group.difficulty

    @property
    def length(self) -> float:
        """Mean length."""
        return self._length / self.weight

    @property
    def difficulty(self) -> float:
        """Mean difficulty."""
        return self._difficulty / self.weight
