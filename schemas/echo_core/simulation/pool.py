"""Who takes part: at the beginning, and at each look. The coordinator's own rule, and others to compare it with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from echo_core.capacity.activation import Candidate, choose_workers, reaches
from echo_core.capacity.decision import PoolLook, PoolRule, Sizing
from echo_core.capacity.overlap import Demand, needed_rate
from echo_core.capacity.sizing import SizingPolicy
from echo_core.simulation.scenario import PoolKind, Scenario


class Decider(Protocol):
    """One look at the pool, at even intervals."""

    def decide(self, look: PoolLook) -> Sizing: ...


class ChosenAnew:
    """The cheapest ones at each look, whoever takes part now."""

    def __init__(self, target: float, expected: Sequence[Candidate]) -> None:
        """`expected`: everybody with the rate that it counts with before it is measured."""
        self._target = target
        self._expected = {each.worker_id: each for each in expected}

    def decide(self, look: PoolLook) -> Sizing:
        """Orders for all that differ from the choice of this moment."""
        seen = [each.candidate if each.candidate.rate > 0 else self._expected[each.worker_id] for each in look.workers]
        chosen = {each.worker_id for each in choose_workers(seen, self._target)}
        return Sizing(
            orders={each.worker_id: each.worker_id in chosen for each in look.workers if each.is_active != (each.worker_id in chosen)}
        )


def decider_of(scenario: Scenario, demand: Demand) -> Decider | None:
    """Who looks at the pool while the run goes on; None: nobody."""
    if scenario.pool.kind is PoolKind.LIVE:
        return PoolRule(scenario.policy, SizingPolicy(margin=scenario.pool.hysteresis), gamma=scenario.pool.gamma, advises=False)
    if scenario.pool.kind is PoolKind.ANEW:
        return ChosenAnew(target_of(scenario, demand), scenario.candidates())
    return None


def first_active(scenario: Scenario, demand: Demand) -> frozenset[str]:
    """Who takes part from the beginning. Without a coordinator that is everybody, as in a run without one."""
    candidates, kind = scenario.candidates(), scenario.pool.kind
    if kind in (PoolKind.LIVE, PoolKind.EVERYBODY):
        chosen = candidates
    elif kind is PoolKind.RANDOM:
        chosen = _at_random(candidates, target_of(scenario, demand), scenario.seed)
    else:
        chosen = choose_workers(candidates, target_of(scenario, demand))
    return frozenset(each.worker_id for each in chosen)


def target_of(scenario: Scenario, demand: Demand) -> float:
    """Rollouts/s that a plan aims at."""
    return needed_rate(demand, scenario.policy.publication_period, scenario.policy.budget, scenario.pool.gamma)


def _at_random(candidates: Sequence[Candidate], target: float, seed: int) -> list[Candidate]:
    drawn = random.Random(seed).sample([each for each in candidates if each.rate > 0], sum(each.rate > 0 for each in candidates))
    chosen: list[Candidate] = []
    rate = 0.0
    for each in drawn:
        if reaches(rate, target):
            break
        chosen.append(each)
        rate += each.rate
    return chosen
