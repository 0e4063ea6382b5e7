"""The time at which a snapshot arrives at each worker, by the plans of `echo_core.dissemination`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from echo_core.capacity.activation import choose_workers
from echo_core.capacity.estimates import BroadcastWatch
from echo_core.capacity.overlap import GAMMA, Demand, needed_rate
from echo_core.dissemination import Line, Lines, chain_arrivals_s, plan_chains, star_arrivals_s
from echo_core.simulation.scenario import PoolKind, Route, Scenario, Weights
from echo_schemas.errors import UserError

# The workers of a plan depend on T_bcast, and T_bcast on their number: a few rounds settle both.
_ROUNDS = 5


def arrivals_s(weights: Weights, receivers: Mapping[str, float]) -> dict[str, float]:
    """By worker, seconds from the publication until it generates with the snapshot. `receivers`: their lines, in bytes per second.

    16 GB, workers of 12.5 MB/s, a learner of 25 MB/s, chunks of 100 MB: two chains. Four workers: the first of each chain has it after
    1280 s, the second one chunk, 8 s, later."""
    if weights.route is Route.FIXED:
        return dict.fromkeys(receivers, weights.fixed_s)
    if weights.route is Route.STAR:
        found = star_arrivals_s(list(receivers), _lines(weights, receivers, 1), weights.num_bytes)
    else:
        found = _over_chains(weights, receivers)
    return {worker: seconds + weights.load_s for worker, seconds in found.items()}


def _over_chains(weights: Weights, receivers: Mapping[str, float]) -> dict[str, float]:
    # Fast workers first: a slow one delays only the workers behind it.
    ordered = sorted(receivers, key=lambda worker: -receivers[worker])
    fastest = max(receivers.values(), default=math.inf)
    wanted = weights.chains or (int(weights.learner_line / fastest) if math.isfinite(weights.learner_line) else len(ordered))
    count = max(1, min(wanted, len(ordered)))
    num_chunks = max(1, math.ceil(weights.num_bytes / (weights.stripes * weights.chunk_bytes)))
    found: dict[str, float] = {}
    for first in range(count):
        members = ordered[first::count]
        lines = _lines(weights, {worker: receivers[worker] for worker in members}, count)
        found |= chain_arrivals_s(plan_chains(members, weights.stripes), lines, weights.num_bytes, num_chunks)
    return found


def _lines(weights: Weights, receivers: Mapping[str, float], shared_by: int) -> Lines:
    workers = {worker: Line(down=line, up=line) for worker, line in receivers.items()}
    return Lines(learner_up=weights.learner_line / shared_by, workers=workers, latency_s=weights.latency_s)


def broadcast_s(weights: Weights, lines: Sequence[float], gamma: float = GAMMA) -> float:
    """T_bcast of workers with these lines, as a coordinator measures it: until ⌈active / gamma⌉ have installed the snapshot."""
    watch = BroadcastWatch(gamma=gamma)
    watch.ready(1, len(lines), 0.0)
    found = arrivals_s(weights, {str(number): line for number, line in enumerate(lines)})
    measured = [watch.installed(worker, 1, seconds) for worker, seconds in sorted(found.items(), key=lambda item: item[1])]
    return next((seconds for seconds in measured if seconds is not None), 0.0)


def demand_of(scenario: Scenario) -> Demand:
    """The demand of a step, with T_bcast predicted for the workers of a plan, or for all workers if all are active at first. Raises
    UserError if a snapshot is published before the previous one has arrived."""
    policy, candidates = scenario.policy, scenario.candidates()
    line_of = {kind.name: kind.line for kind in scenario.kinds}
    rollouts, period = policy.groups_per_step * policy.group_size, policy.publication_period
    takes_all = scenario.pool.kind in (PoolKind.LIVE, PoolKind.EVERYBODY)
    taken = candidates
    for _ in range(_ROUNDS):
        way_s = broadcast_s(scenario.weights, [line_of[each.kind] for each in taken], scenario.pool.gamma)
        demand = Demand(train_s=scenario.train_s, broadcast_s=way_s, rollouts=rollouts)
        target = needed_rate(demand, period, policy.budget, scenario.pool.gamma)
        chosen = candidates if takes_all or math.isinf(target) else choose_workers(candidates, target)
        if len(chosen) == len(taken):
            break
        taken = chosen
    if period * demand.train_s <= demand.broadcast_s:
        raise UserError(
            f"Weights take {demand.broadcast_s:.4g} s to reach {len(taken)} workers and are published every "
            f"{period * demand.train_s:.4g} s: the next ones come before these work.",
            hint="Raise publication_period and budget, use chains, or give the learner a faster line or smaller weights.",
        )
    return demand
