"""Plans workers, publication period and cost for one staleness budget; or says what to change. Pure.

provision(demand, candidates, Limits(budget=3))  →  Provision: feasible or not, period, workers, waiting, bound, cost
remedies(…)                                      →  Remedies: single changes, each of which is enough
advice(…)                                        →  the same as one sentence
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from echo_core.capacity.activation import Candidate, by_unit_price, choose_optimum, choose_workers, reaches, total_price, total_rate
from echo_core.capacity.overlap import GAMMA, Demand, bubble_share, cost_per_step, min_rate, needed_rate, staleness_bound, wait_s
from echo_schemas.errors import UserError

# Pools whose prices differ by less count as equal; then the shorter period is better, because its samples are younger.
_SAME_PRICE = 0.01
# No remedy raises the budget further: ECHO-2's runs diverged with larger ones (S = 11, §5).
_LARGEST_BUDGET = 10
# No remedy adds more workers of one kind.
_MOST_MORE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The user's limits. Raises UserError for limits that no asynchronous run can keep."""

    budget: int
    """S: the largest staleness that is trained."""
    publication_period: int | None = None
    """kappa; None: the one with the cheapest pool, and the shortest of those."""
    gamma: float = GAMMA
    learner_price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(
                f"A budget of {self.budget} lets nothing overlap: the learner waits for each batch.",
                hint='Use a budget of at least 1, or mode = "sequential", which needs no plan.',
            )
        if self.publication_period is not None and not 1 <= self.publication_period <= self.budget + 1:
            raise UserError(
                f"A publication period of {self.publication_period} does not fit a budget of {self.budget}.",
                hint=f"Use one between 1 and {self.budget + 1}, or auto.",
            )
        if not (math.isfinite(self.gamma) and self.gamma >= 1):
            raise UserError(f"A safety factor of {self.gamma:g} is below 1.", hint=f"Use 1.0 for none; ECHO-2 uses {GAMMA}.")
        if not (math.isfinite(self.learner_price_per_hour) and self.learner_price_per_hour >= 0):
            raise UserError(f"A learner cannot cost {self.learner_price_per_hour:g} an hour.", hint="Give a price that is not negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Single changes, each of which alone makes the plan feasible; None if that change alone cannot."""

    budget: int | None = None
    publication_period: int | None = None
    more: tuple[str, int] | None = None
    """Kind, and how many more of it: the kind for which that costs the least."""
    broadcast_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    """The plan. If it is not feasible, its figures are those of all workers together, and `remedies` says what would help."""

    limits: Limits
    publication_period: int
    target: float
    """Needed rollouts/s, the safety factor included; infinite if no rate suffices."""
    workers: tuple[Candidate, ...]
    is_feasible: bool
    wait_s: float
    """Of the learner, in each publication period."""
    bubble_share: float
    staleness_bound: float
    cost_per_step: float
    optimum_price_per_hour: float | None = None
    """Of the cheapest sufficient workers; None if there are none, or the search would take too long."""
    remedies: Remedies = Remedies()

    @property
    def rate(self) -> float:
        """Rollouts/s of the workers together."""
        return total_rate(self.workers)

    @property
    def price_per_hour(self) -> float:
        """Of the workers, without the learner."""
        return total_price(self.workers)


def provision(demand: Demand, candidates: Sequence[Candidate], limits: Limits) -> Provision:
    """The cheapest plan under these limits; if none is feasible, the plan with all workers and the remedies.

    T_train = 1600, T_bcast = 120, R = 1024, S = 3; eight of 0.5 rollouts/s for $2.5 an hour, thirty of 0.2 for $0.4:
    kappa = 2: needed 1.1 · 2048 / 3080 = 0.7314 rollouts/s; rho = 5.0 and 2.0, so the second kind first;
    four of it make 0.8 for $1.6 an hour. Of 0.7314 the learner never waits, and no sample is more than 3 versions old."""
    plans = [_plan(demand, candidates, limits, period) for period in _periods(limits)]
    feasible = [plan for plan in plans if plan.is_feasible]
    if feasible:
        cheapest = min(plan.price_per_hour for plan in feasible)
        chosen = next(plan for plan in feasible if plan.price_per_hour <= cheapest * (1 + _SAME_PRICE))
        optimum = choose_optimum(candidates, chosen.target)
        return replace(chosen, optimum_price_per_hour=None if optimum is None else total_price(optimum))
    # The period with the least target is the nearest to feasible; if all targets are infinite, the paper's.
    nearest = min(plans, key=lambda plan: (plan.target, abs(plan.publication_period - (limits.budget - 1))))
    return replace(nearest, remedies=remedies(demand, candidates, limits, nearest.publication_period))


def _plan(demand: Demand, candidates: Sequence[Candidate], limits: Limits, period: int) -> Provision:
    target = needed_rate(demand, period, limits.budget, limits.gamma)
    is_feasible = math.isfinite(target) and reaches(total_rate(candidates), target)
    workers = choose_workers(candidates, target) if is_feasible else by_unit_price(each for each in candidates if each.rate > 0)
    rate, price = total_rate(workers), total_price(workers) + limits.learner_price_per_hour
    return Provision(
        limits=limits,
        publication_period=period,
        target=target,
        workers=tuple(workers),
        is_feasible=is_feasible,
        wait_s=wait_s(demand, period, rate),
        bubble_share=bubble_share(demand, period, rate),
        staleness_bound=staleness_bound(demand, period, rate),
        cost_per_step=cost_per_step(demand, period, rate, price),
    )


def is_feasible(demand: Demand, candidates: Sequence[Candidate], limits: Limits) -> bool:
    """Whether all candidates together reach the needed rate of some period that the limits allow."""
    rate = total_rate(candidates)
    needs = [needed_rate(demand, period, limits.budget, limits.gamma) for period in _periods(limits)]
    return any(math.isfinite(need) and reaches(rate, need) for need in needs)


def remedies(demand: Demand, candidates: Sequence[Candidate], limits: Limits, period: int) -> Remedies:
    """Single changes that make an infeasible plan feasible, each the smallest of its kind. `period`: the plan's.

    T_train = 100, T_bcast = 180, R = 100, S = 2, one worker of 2 rollouts/s: with kappa = 2 the budget leaves 100 s, less than T_bcast;
    S = 4 with kappa = 3 needs 1.1 · max(300 / 120, 100 / 20) = 5.5 rollouts/s; S = 5 with kappa = 3 1.1 · max(2.5, 100 / 120) = 2.75;
    S = 6 with kappa = 4 1.1 · 400 / 220 = 2.0, which the worker makes: raise the budget to 6."""
    budget = next(
        (more for more in range(limits.budget + 1, _LARGEST_BUDGET + 1) if is_feasible(demand, candidates, replace(limits, budget=more))),
        None,
    )
    other = None
    if limits.publication_period is not None:
        rest = [each for each in range(1, limits.budget + 1) if is_feasible(demand, candidates, replace(limits, publication_period=each))]
        other = min(rest, key=lambda each: abs(each - period), default=None)
    return Remedies(
        budget=budget,
        publication_period=other,
        more=_more_workers(demand, candidates, limits, period),
        broadcast_s=_shorter_broadcast(demand, candidates, limits),
    )


def _more_workers(demand: Demand, candidates: Sequence[Candidate], limits: Limits, period: int) -> tuple[str, int] | None:
    """How many more workers of one kind suffice, at the rate of the slowest worker of that kind."""
    lacking = needed_rate(demand, period, limits.budget, limits.gamma) - total_rate(candidates)
    if not math.isfinite(lacking):
        return None
    named = sorted((each for each in candidates if each.rate > 0), key=lambda each: (each.kind, each.rate))
    slowest = [next(same) for _, same in groupby(named, key=lambda each: each.kind)]
    counted = [(max(1, math.ceil(lacking / each.rate)), each) for each in slowest]
    count, cheapest = min(counted, key=lambda pair: (pair[0] * pair[1].price_per_hour, pair[0]), default=(0, None))
    return None if cheapest is None or count > _MOST_MORE else (cheapest.kind or cheapest.worker_id, count)


def _shorter_broadcast(demand: Demand, candidates: Sequence[Candidate], limits: Limits) -> float | None:
    """The longest T_bcast with which all workers suffice, under any allowed period: eq. 2 and 7, solved for T_bcast."""
    rate = total_rate(candidates) / limits.gamma
    if rate <= 0:
        return None
    making_s = demand.rollouts / rate
    longest = max(
        min((limits.budget - period + 1) * demand.train_s - making_s, period * (demand.train_s - making_s)) for period in _periods(limits)
    )
    return longest if longest > 0 else None


def _periods(limits: Limits) -> Sequence[int]:
    return [limits.publication_period] if limits.publication_period is not None else range(1, limits.budget + 1)


def advice(plan: Provision, demand: Demand) -> str:
    """The obstacle and what would help, in one sentence or two; empty for a feasible plan."""
    if plan.is_feasible:
        return ""
    helps = _in_words(plan)
    return f"{_obstacle(plan, demand)} {'To mend it, ' + helps + '.' if helps else _HOPELESS}"


_HOPELESS = "No single change mends it: shorten T_bcast, lower the rollouts of a step, and add workers."


def _obstacle(plan: Provision, demand: Demand) -> str:
    period, budget = plan.publication_period, plan.limits.budget
    if math.isinf(min_rate(demand, period)):
        return (
            f"New weights take {demand.broadcast_s:g} s to arrive and are published every {period * demand.train_s:g} s: "
            f"the next ones come before these work."
        )
    if math.isinf(plan.target):
        return f"With weights every {_ordinal(period)}step, samples become more than {budget} versions old, however many workers there are."
    return f"{plan.target:.4g} rollouts/s are needed, and all workers together make {plan.rate:.4g}."


def _in_words(plan: Provision) -> str:
    found, period, helps = [], plan.publication_period, plan.remedies
    if helps.budget is not None:
        found.append(f"raise the budget to {helps.budget}")
    if helps.publication_period is not None:
        found.append(f"publish every {_ordinal(helps.publication_period)}step instead of every {_ordinal(period)}step")
    if helps.more is not None:
        kind, count = helps.more
        found.append(f"add {count} worker{'s' if count > 1 else ''} of kind {kind}")
    if helps.broadcast_s is not None:
        found.append(f"let weights arrive within {_rounded_down(helps.broadcast_s):g} s")
    return ", or ".join(found)


def _ordinal(period: int) -> str:
    return {1: "", 2: "second ", 3: "third "}.get(period, f"{period}th ")


def _rounded_down(number: float) -> float:
    """To three digits, rounded down, so that the remedy still suffices."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.floor(number / unit) * unit
