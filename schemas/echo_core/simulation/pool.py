"""The choice of active workers: at the start, and at each look. The coordinator's own rule, and others to compare it with."""

from __future__ import annotations

import random
from collections.abc import Sequence

from echo_core.capacity.activation import Candidate, choose_workers, until_reached
from echo_core.capacity.decision import PoolLook, PoolRule, Sizing
from echo_core.capacity.overlap import Demand, needed_rate
from echo_core.capacity.sizing import SizingPolicy
from echo_core.simulation.scenario import PoolKind, Scenario


class ChosenAnew:
    """Chooses the cheapest workers anew at each look, whether they are active or not."""

    def __init__(self, target: float, expected: Sequence[Candidate]) -> None:
        """`expected`: all workers with the rates that count until they are measured."""
        self._target = target
        self._expected = {each.worker_id: each for each in expected}

    def decide(self, look: PoolLook) -> Sizing:
        """Orders for all workers whose state differs from the present choice."""
        seen = [each.candidate if each.candidate.rate > 0 else self._expected[each.worker_id] for each in look.workers]
        chosen = {each.worker_id for each in choose_workers(seen, self._target)}
        return Sizing(
            orders={each.worker_id: each.worker_id in chosen for each in look.workers if each.is_active != (each.worker_id in chosen)}
        )


def decider_of(scenario: Scenario, demand: Demand) -> PoolRule | ChosenAnew | None:
    """The rule that looks at the pool during the run; None: no rule."""
    if scenario.pool.kind is PoolKind.LIVE:
        return PoolRule(scenario.policy, SizingPolicy(margin=scenario.pool.hysteresis), gamma=scenario.pool.gamma, advises=False)
    if scenario.pool.kind is PoolKind.ANEW:
        return ChosenAnew(target_of(scenario, demand), scenario.candidates())
    return None


def first_active(scenario: Scenario, demand: Demand) -> frozenset[str]:
    """The workers that are active at the start; all of them under the coordinator's rule, and in a run without one."""
    candidates, kind = scenario.candidates(), scenario.pool.kind
    if kind in (PoolKind.LIVE, PoolKind.EVERYBODY):
        chosen = candidates
    elif kind is PoolKind.RANDOM:
        chosen = _at_random(candidates, target_of(scenario, demand), scenario.seed)
    else:
        chosen = choose_workers(candidates, target_of(scenario, demand))
    return frozenset(each.worker_id for each in chosen)


def target_of(scenario: Scenario, demand: Demand) -> float:
    """The target of a plan, in rollouts/s."""
    return needed_rate(demand, scenario.policy.publication_period, scenario.policy.budget, scenario.pool.gamma)


def _at_random(candidates: Sequence[Candidate], target: float, seed: int) -> list[Candidate]:
    able = [each for each in candidates if each.rate > 0]
    return until_reached(random.Random(seed).sample(able, len(able)), target)
