"""One look at the pool: which workers are activated or released, and why. Pure.

no step known              all workers take part
T_bcast not known yet      workers are activated if the rate is short; none is released
rate short                 the cheapest are activated                  (`PoolSizer`)
rate far above the target  the dearest is released, one a look         (`PoolSizer`)
others would cost less     they are activated in place of dear ones    (`PoolSizer`)
all together too slow      all workers take part, and a sentence says what would help
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from echo_core.capacity.activation import Candidate, reaches, total_price, total_rate
from echo_core.capacity.overlap import Demand, min_rate, needed_rate, staleness_bound
from echo_core.capacity.provisioning import Limits, advice, provision
from echo_core.capacity.sizing import PoolSizer, Resizing, SizingPolicy
from echo_core.policy import StalenessPolicy

# A single worker needs no price.
_TO_CHOOSE = 2
# Workers that a sentence names.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorker:
    """A worker with heartbeats. Rate 0: unknown. `is_active`: no order in force keeps it on standby."""

    candidate: Candidate
    is_active: bool

    @property
    def worker_id(self) -> str:
        return self.candidate.worker_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLook:
    """The pool at one moment. `train_s`, `broadcast_s`: None until they are measured."""

    train_s: float | None
    broadcast_s: float | None
    workers: Sequence[PoolWorker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The result of one look. `orders`: by worker, whether it shall take part; only changes. `reason`: for the log, empty without orders.
    `advice`: what would help a pool that is too small, else empty. Rates in rollouts/s; None while no step is known."""

    orders: Mapping[str, bool] = field(default_factory=dict)
    reason: str = ""
    advice: str = ""
    min_rate: float | None = None
    target: float | None = None
    rate: float = 0.0
    bound: float | None = None
    is_feasible: bool | None = None

    def split(self, workers: Iterable[PoolWorker]) -> tuple[list[PoolWorker], list[PoolWorker]]:
        """The workers that take part under the orders, and those on standby."""
        active: list[PoolWorker] = []
        standby: list[PoolWorker] = []
        for each in workers:
            (active if self.orders.get(each.worker_id, each.is_active) else standby).append(each)
        return active, standby


def figures_of(look: PoolLook, sizing: Sizing) -> dict[str, float]:
    """The numbers of a decision, by name, without unknown or infinite ones. Rates in rollouts/s before the orders, prices an hour after
    them."""
    active, standby = sizing.split(look.workers)
    figures = {
        "train_s": look.train_s,
        "broadcast_s": look.broadcast_s,
        "min_rate": sizing.min_rate,
        "target_rate": sizing.target,
        "rate": sizing.rate,
        "active": len(active),
        "price_active": total_price(each.candidate for each in active),
        "price_standby": total_price(each.candidate for each in standby),
    }
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def missing_prices(workers: Sequence[PoolWorker]) -> str:
    """A sentence about workers without a price; empty if all have one, or there are too few workers to choose among."""
    without = sorted(each.worker_id for each in workers if not each.candidate.price_per_hour)
    if not without or len(workers) < _TO_CHOOSE:
        return ""
    if len(without) == len(workers):
        return "No worker has a price, so the slowest are released first. Write price_per_hour in [rollout], or for each [[rollout.pool]]."
    return f"Without a price {_named(without)} count as free and are released last. Write their price_per_hour, or price_file."


def _named(workers: Sequence[str]) -> str:
    """`a, b`; of many the first names, and the number of others."""
    return ", ".join(workers[:_NAMED]) + (f" and {len(workers) - _NAMED} more" if len(workers) > _NAMED else "")


class PoolRule:
    """The rule, with its state between looks: for how long the rate has been off target."""

    def __init__(self, policy: StalenessPolicy, sizing: SizingPolicy, *, gamma: float, advises: bool = True) -> None:
        """`advises`: whether it says what would help a pool that is too small, which takes long for thousands of workers."""
        self._advises = advises
        self._period, self._budget = policy.publication_period, policy.budget
        self._rollouts = policy.groups_per_step * policy.group_size
        self._gamma = gamma
        self._sizer = PoolSizer(sizing)

    def decide(self, look: PoolLook) -> Sizing:
        """One look, at even intervals. An unmeasured worker stays active until its rate is measured.

        R = 8 rollouts a step, kappa = 1, S = 1, T_train = 1 s, T_bcast = 0.2 s, gamma = 1.1; `cheap` and `dear` make 20 rollouts/s each:
        needed 1.1 · 8 / (1 − 0.2) = 11 rollouts/s; without `dear` 20 ≥ 11 · 1.15, so five looks later {dear: False};
        `cheap` dies: 0 < 11, so two looks later {dear: True}."""
        standby = [each.worker_id for each in look.workers if not each.is_active]
        if look.train_s is None:
            return Sizing(orders=dict.fromkeys(standby, True), reason=_activated(standby, "no step of the learner is known yet"))
        demand = Demand(train_s=look.train_s, broadcast_s=look.broadcast_s or 0.0, rollouts=self._rollouts)
        target = needed_rate(demand, self._period, self._budget, self._gamma)
        measured = [each for each in look.workers if each.candidate.rate > 0]
        candidates = [each.candidate for each in measured]
        self._sizer.admit(each.worker_id for each in measured if each.is_active)
        resizing = self._sizer.tick(candidates, target)
        is_feasible = reaches(total_rate(candidates), target)
        rate = total_rate(each.candidate for each in measured if each.is_active)
        orders, reason = self._orders(look, resizing, rate, target)
        if not is_feasible and not orders and standby and all(each.is_active for each in measured):
            orders, reason = dict.fromkeys(standby, True), _activated(standby, "all that are measured make too little")
        return Sizing(
            orders=orders,
            reason=reason,
            advice="" if is_feasible or not self._advises else self._advice(demand, candidates),
            min_rate=min_rate(demand, self._period),
            target=target,
            rate=rate,
            bound=staleness_bound(demand, self._period, rate),
            is_feasible=is_feasible,
        )

    def _orders(self, look: PoolLook, resizing: Resizing, rate: float, target: float) -> tuple[dict[str, bool], str]:
        if resizing.replaces:
            why = f"they can do the work of {_named(resizing.replaces)} for less, which is then released"
            return dict.fromkeys(resizing.activate, True), _activated(resizing.activate, why)
        if resizing.activate:
            short = f"the active workers make {rate:.4g} of {target:.4g} rollouts/s"
            return dict.fromkeys(resizing.activate, True), _activated(resizing.activate, short)
        # A worker that is not released after all is active in the next look too.
        if not resizing.release or look.broadcast_s is None:
            return {}, ""
        (spare,) = (each.candidate for each in look.workers if each.worker_id in resizing.release)
        reason = (
            f"release {spare.worker_id}: {rate - spare.rate:.4g} rollouts/s without it are enough for {target:.4g}, "
            f"and at {spare.price_per_hour:.4g} an hour it is the dearest for what it makes of those that the cheapest choice leaves out"
        )
        return {spare.worker_id: False}, reason

    def _advice(self, demand: Demand, candidates: Sequence[Candidate]) -> str:
        limits = Limits(budget=self._budget, publication_period=self._period, gamma=self._gamma)
        return advice(provision(demand, candidates, limits), demand)


def _activated(workers: Sequence[str], why: str) -> str:
    return f"activate {', '.join(sorted(workers))}: {why}" if workers else ""
