"""One worker of the simulated pool: its state, its groups in hand, its speed, its paid time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from echo_core.capacity.activation import Candidate
from echo_core.capacity.decision import PoolWorker
from echo_core.capacity.estimates import Speed
from echo_core.simulation.scenario import Kind


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt's samples, generated together. `length`: of its generation, relative to the mean. `required`: the oldest weights that may
    generate it."""

    seq: int
    length: float
    difficulty: float
    required: int


@dataclass(slots=True, eq=False)
class Machine:
    """The state of one worker. `life` counts its engines, `stay` its periods of taking requests: an event of an earlier one is void."""

    worker_id: str
    kind: Kind
    is_there: bool = False
    """Neither failed nor preempted."""
    is_on: bool = False
    """An engine runs or starts, and is paid."""
    is_active: bool = False
    """No order in force keeps it from taking requests."""
    is_taking: bool = False
    installed: int | None = None
    life: int = 0
    stay: int = 0
    num_parked: int = 0
    """Places for a group that wait for newer weights."""
    in_hand: dict[int, tuple[Any, Group, int, float]] = field(default_factory=dict)
    """By seq: the event of its end, the group, the version that generates it, the moment of its end."""
    lost_s: float = -math.inf
    speed: Speed = field(default_factory=Speed)
    paid_s: float = 0.0
    busy_s: float = 0.0
    _seen_s: float = 0.0
    _shown: PoolWorker | None = None

    def settle(self, now_s: float, samples: int = 0) -> None:
        """Count the time since the last call. Call it before each change; `samples`: of a group that has just ended."""
        elapsed_s, self._seen_s = now_s - self._seen_s, now_s
        if self.is_on:
            self.paid_s += elapsed_s
        if self.in_hand:
            self.busy_s += elapsed_s
            self.speed.add(busy_s=elapsed_s, samples=samples, tokens=samples)

    def start(self) -> None:
        """A new engine starts, without weights and speed."""
        self.life += 1
        self.is_on, self.installed, self.speed = True, None, Speed()

    def stop_taking(self) -> None:
        """Take no more requests: free places become void."""
        self.stay += 1
        self.is_taking, self.num_parked = False, 0

    def hand_back(self) -> list[Group]:
        """Give back the groups in hand."""
        groups = [group for _, group, _, _ in self.in_hand.values()]
        self.in_hand.clear()
        return groups

    def is_heard(self, now_s: float, patience_s: float) -> bool:
        """Whether the coordinator counts it: it has weights, or its loss is not noticed yet."""
        return (self.is_on and self.installed is not None) or now_s - self.lost_s <= patience_s

    def shown(self, rate: float) -> PoolWorker:
        """The coordinator's view of it. Cached, because ten thousand workers are looked at often."""
        shown = self._shown
        if shown is None or shown.candidate.rate != rate or shown.is_active != self.is_active:
            candidate = Candidate(worker_id=self.worker_id, kind=self.kind.name, rate=rate, price_per_hour=self.kind.price_per_hour)
            shown = self._shown = PoolWorker(candidate=candidate, is_active=self.is_active)
        return shown
