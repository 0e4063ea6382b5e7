"""A fleet and a learner in simulated time: what rules of sizing are worth. Pure: events in a heap, a seed, no clock.

    finish    a worker has made a group: into the buffer, and on to the next one
    install   a worker has the snapshot that was published T_bcast ago, or at whose end it joined
    trained   a step has ended: version + 1, a publication every kappa steps, the next batch if the buffer has one
    tick      the sizing rule looks at who is there
    up, down  a machine comes, or is taken away with what it has in hand

As in the paper's worst case, every worker installs T_bcast after the publication. A worker makes one group at a time, under the weights
that it had at the group's beginning. Admission and the oldest weights that may answer are those of `echo_core.dispatch`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Protocol

from echo_core.capacity.activation import Candidate, choose_workers
from echo_core.capacity.overlap import Demand, needed_rate
from echo_core.capacity.sizing import PoolSizer
from echo_core.dispatch import Standing, may_issue, required_version
from echo_core.policy import Admission, StalenessPolicy

_SECONDS_PER_HOUR = 3600.0
# A learner that waits for ever ends the simulation: after so many times the time that the steps would take.
_PATIENCE = 20


class BatchOrder(StrEnum):
    """Which of the admissible samples a batch takes."""

    NEWEST_FIRST = "newest_first"
    """What the paper's bound takes for granted."""
    OLDEST_FIRST = "oldest_first"
    """What EchoSwarm does: nothing is made for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A worker and how long it stays. Times between coming and going are exponential; infinite: never."""

    worker: Candidate
    joins_s: float = 0.0
    mean_up_s: float = math.inf
    mean_down_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated."""

    demand: Demand
    policy: StalenessPolicy
    machines: Sequence[Machine]
    steps: int = 100
    gamma: float = 1.1
    order: BatchOrder = BatchOrder.OLDEST_FIRST
    tick_s: float = 60.0
    """Between two looks of the sizing rule."""
    spread: float = 0.0
    """Of a group's time, and of the rate that the rule is told: uniform within ± this share."""
    learner_price_per_hour: float = 0.0
    seed: int = 0

    @property
    def target(self) -> float:
        """Rollouts/s that the rules aim at."""
        return needed_rate(self.demand, self.policy.publication_period, self.policy.budget, self.gamma)


class SizingRule(Protocol):
    """Who shall work, asked at even intervals. `available`: everybody that is up."""

    def active(self, available: Sequence[Candidate], target: float) -> frozenset[str]: ...


class AllOn:
    """Everybody."""

    def active(self, available: Sequence[Candidate], target: float) -> frozenset[str]:
        """All that are up."""
        return frozenset(each.worker_id for each in available)


class FixedPool:
    """Those that were the cheapest at the beginning; whoever goes is waited for."""

    def __init__(self) -> None:
        self._chosen: frozenset[str] | None = None

    def active(self, available: Sequence[Candidate], target: float) -> frozenset[str]:
        """The first choice, for ever."""
        if self._chosen is None:
            self._chosen = frozenset(each.worker_id for each in choose_workers(available, target))
        return self._chosen


class ChosenAnew:
    """The cheapest ones, chosen anew at each look: no hysteresis."""

    def active(self, available: Sequence[Candidate], target: float) -> frozenset[str]:
        """The choice of this moment."""
        return frozenset(each.worker_id for each in choose_workers(available, target))


class Hysteresis:
    """`PoolSizer`, from the cheapest ones at the beginning on."""

    def __init__(self, sizer: PoolSizer) -> None:
        self._sizer = sizer

    def active(self, available: Sequence[Candidate], target: float) -> frozenset[str]:
        """After one tick of the sizer."""
        self._sizer.tick(available, target)
        return self._sizer.active


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it, from the first batch on. `staleness`: entry i counts the groups that were i versions old in their batch."""

    steps: int
    seconds: float
    bubble_ratio: float
    staleness: tuple[int, ...]
    cost_per_step: float
    mean_active: float
    num_activated: int
    num_released: int
    num_stale: int
    """Groups that nobody trained because they were too old."""
    num_lost: int
    """Groups that went with their machine."""


class _What(IntEnum):
    """Kinds of events; of those at one moment the smaller comes first."""

    FINISH = 0
    INSTALL = 1
    TRAINED = 2
    UP = 3
    DOWN = 4
    TICK = 5


@dataclass(slots=True)
class _Machine:
    """`life`: counts its comings and goings; an event of an earlier life is void."""

    spec: Machine
    is_up: bool = False
    is_active: bool = False
    is_busy: bool = False
    installed: int | None = None
    version: int = 0
    life: int = 0
    paid_since_s: float | None = None
    used_s: float = 0.0


@dataclass(slots=True)
class _Learner:
    version: int = 0
    published: int = 0
    is_training: bool = False
    began_s: float | None = None
    idle_since_s: float = 0.0
    idle_s: float = 0.0
    steps: int = 0


def simulate(scenario: Scenario, rule: SizingRule) -> Outcome:
    """Run the scenario until its steps are trained, or the learner has waited for twenty times as long as they would take."""
    return _Fleet(scenario, rule).run()


@dataclass(slots=True)
class _Fleet:
    """One simulation."""

    scenario: Scenario
    rule: SizingRule
    now_s: float = 0.0
    learner: _Learner = field(default_factory=_Learner)
    ready: Counter[int] = field(default_factory=Counter)
    undecided: int = 0
    trained: Counter[int] = field(default_factory=Counter)
    num_activated: int = 0
    num_released: int = 0
    num_stale: int = 0
    num_lost: int = 0
    num_events: int = 0
    events: list[tuple[float, _What, int, int, int, int]] = field(default_factory=list)
    machines: list[_Machine] = field(init=False)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.machines = [_Machine(spec) for spec in self.scenario.machines]
        self.random = random.Random(self.scenario.seed)

    def run(self) -> Outcome:
        for index, machine in enumerate(self.machines):
            self._after(machine.spec.joins_s, _What.UP, index)
        self._after(0.0, _What.TICK)
        latest_s = _PATIENCE * self.scenario.steps * (self.scenario.demand.train_s + self.scenario.demand.broadcast_s)
        while self.learner.steps < self.scenario.steps and self.events[0][0] <= latest_s:
            self.now_s, what, _, index, life, version = heapq.heappop(self.events)
            if what is _What.TICK:
                self._tick()
            elif what is _What.TRAINED:
                self._trained()
            elif life == self.machines[index].life:
                self._happened(what, index, version)
        return self._outcome()

    def _after(self, seconds: float, what: _What, index: int = 0, version: int = 0) -> None:
        if math.isinf(seconds):
            return
        self.num_events += 1
        life = self.machines[index].life if self.machines else 0
        heapq.heappush(self.events, (self.now_s + seconds, what, self.num_events, index, life, version))

    def _happened(self, what: _What, index: int, version: int) -> None:
        """To one machine."""
        machine = self.machines[index]
        if what is _What.FINISH:
            machine.is_busy = False
            self.ready[machine.version] += 1
            self._begin(index)
            self._begin_step()
        elif what is _What.INSTALL:
            machine.installed = max(version, -1 if machine.installed is None else machine.installed)
            self._begin(index)
        else:
            self._turn(index, is_up=what is _What.UP)
        self._settle(machine)

    def _turn(self, index: int, *, is_up: bool) -> None:
        """A machine comes or goes; the sizing rule hears of it at its next look."""
        machine = self.machines[index]
        machine.life += 1
        if machine.is_busy:
            self.num_lost += 1
            self.undecided -= 1
        machine.is_up, machine.is_active, machine.is_busy, machine.installed = is_up, False, False, None
        mean_s = machine.spec.mean_up_s if is_up else machine.spec.mean_down_s
        if math.isfinite(mean_s):
            self._after(self.random.expovariate(1 / mean_s), _What.DOWN if is_up else _What.UP, index)

    def _tick(self) -> None:
        self._after(self.scenario.tick_s, _What.TICK)
        available = [
            replace(machine.spec.worker, rate=machine.spec.worker.rate * self._noise()) for machine in self.machines if machine.is_up
        ]
        wanted = self.rule.active(available, self.scenario.target)
        for index, machine in enumerate(self.machines):
            shall = machine.is_up and machine.spec.worker.worker_id in wanted
            if shall == machine.is_active:
                continue
            machine.is_active = shall
            if shall:
                self.num_activated += 1
                # Those of the very beginning have the first weights.
                self._after(self.scenario.demand.broadcast_s if self.now_s else 0.0, _What.INSTALL, index, self.learner.published)
            else:
                self.num_released += 1
                machine.installed = None
            self._settle(machine)

    def _begin(self, index: int) -> None:
        """The next group of a worker, if it is idle and admission lets it."""
        machine = self.machines[index]
        if machine.is_busy or not machine.is_active or machine.installed is None or machine.spec.worker.rate <= 0:
            return
        learner = self.learner
        standing = Standing(version=learner.version, published=learner.published, undecided=self.undecided)
        policy = self.scenario.policy
        if not may_issue(standing, policy):
            return
        if policy.admission is Admission.PACE and machine.installed < required_version(standing, policy):
            return
        machine.is_busy, machine.version = True, machine.installed
        self.undecided += 1
        self._after(policy.group_size / machine.spec.worker.rate * self._noise(), _What.FINISH, index)

    def _begin_step(self) -> None:
        """A step, if the buffer has a batch and no step is running."""
        learner, policy = self.learner, self.scenario.policy
        if learner.is_training:
            return
        for version in [each for each in self.ready if each < learner.version - policy.budget]:
            stale = self.ready.pop(version)
            self.num_stale += stale
            self.undecided -= stale
        lacking = policy.groups_per_step
        if self.ready.total() < lacking:
            return
        for version in sorted(self.ready, reverse=self.scenario.order is BatchOrder.NEWEST_FIRST):
            if not lacking:
                break
            taken = min(lacking, self.ready[version])
            self.ready[version] -= taken
            self.trained[learner.version - version] += taken
            lacking -= taken
        self.ready = +self.ready
        learner.is_training = True
        if learner.began_s is None:
            learner.began_s = self.now_s
            for machine in self.machines:
                machine.used_s = 0.0
                machine.paid_since_s = None if machine.paid_since_s is None else self.now_s
        else:
            learner.idle_s += self.now_s - learner.idle_since_s
        self._after(self.scenario.demand.train_s, _What.TRAINED)

    def _trained(self) -> None:
        learner, policy = self.learner, self.scenario.policy
        learner.version += 1
        learner.steps += 1
        learner.is_training, learner.idle_since_s = False, self.now_s
        self.undecided -= policy.groups_per_step
        if learner.version % policy.publication_period == 0:
            learner.published = learner.version
            for index, machine in enumerate(self.machines):
                if machine.is_active:
                    self._after(self.scenario.demand.broadcast_s, _What.INSTALL, index, learner.version)
        self._begin_step()
        for index in range(len(self.machines)):
            self._begin(index)

    def _settle(self, machine: _Machine) -> None:
        """Pay up to now. A machine is paid while it is active, or ends what it has in hand."""
        if machine.paid_since_s is not None:
            machine.used_s += self.now_s - machine.paid_since_s
        machine.paid_since_s = self.now_s if machine.is_up and (machine.is_active or machine.is_busy) else None

    def _noise(self) -> float:
        spread = self.scenario.spread
        return self.random.uniform(1 - spread, 1 + spread) if spread else 1.0

    def _outcome(self) -> Outcome:
        for machine in self.machines:
            self._settle(machine)
        learner = self.learner
        seconds = self.now_s - (self.now_s if learner.began_s is None else learner.began_s)
        used_s = math.fsum(machine.used_s for machine in self.machines)
        paid = math.fsum(machine.used_s * machine.spec.worker.price_per_hour for machine in self.machines)
        paid += seconds * self.scenario.learner_price_per_hour
        return Outcome(
            steps=learner.steps,
            seconds=seconds,
            bubble_ratio=max(0.0, 1 - learner.steps * self.scenario.demand.train_s / seconds) if seconds else 1.0,
            staleness=tuple(self.trained[age] for age in range(max(self.trained, default=-1) + 1)),
            cost_per_step=paid / _SECONDS_PER_HOUR / learner.steps if learner.steps else math.inf,
            mean_active=used_s / seconds if seconds else 0.0,
            num_activated=self.num_activated,
            num_released=self.num_released,
            num_stale=self.num_stale,
            num_lost=self.num_lost,
        )
