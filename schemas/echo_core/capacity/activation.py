"""The choice of workers that reach a rate at the lowest price. Pure.

The question is a covering problem: min Σ c_i subject to Σ mu_i ≥ target (ECHO-2 eq. 3), NP-hard. Three answers:

    cheapest_first     the paper's: by c/mu until the target is reached. Costs at most the optimum + the price of the last worker taken
    choose_workers     the same with another last worker if that is cheaper: at most twice the optimum, and never above the paper's
    choose_optimum     the optimum, by branch and bound; None if the search would take too long
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from echo_schemas.errors import UserError

# Rates are sums of measured numbers: a target missed only by rounding counts as reached.
_ROUNDING = 1e-9
# Limits of branch and bound: about a second, and its depth.
_MOST_NODES = 100_000
_MOST_KINDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that could work. Raises UserError for impossible numbers."""

    worker_id: str
    kind: str = ""
    rate: float
    """mu: rewarded rollouts per second that arrive at the learner while it is busy."""
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate >= 0):
            problem, hint = f"make {self.rate:g} rollouts per second", "Give a rate that is not negative."
            raise UserError(f"The worker {self.worker_id!r} cannot {problem}.", hint=hint)
        if not (math.isfinite(self.price_per_hour) and self.price_per_hour >= 0):
            problem, hint = f"cost {self.price_per_hour:g} an hour", "Give a price that is not negative."
            raise UserError(f"The worker {self.worker_id!r} cannot {problem}.", hint=hint)

    @property
    def unit_price(self) -> float:
        """rho = c / mu; infinite at rate 0."""
        return self.price_per_hour / self.rate if self.rate > 0 else math.inf


def by_unit_price(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Cheapest per rollout first; among equals the faster one, then by name, so that the order is unique."""
    return sorted(candidates, key=lambda each: (each.unit_price, -each.rate, each.kind, each.worker_id))


def total_rate(candidates: Iterable[Candidate]) -> float:
    """mu of all together, in rollouts/s."""
    return math.fsum(each.rate for each in candidates)


def total_price(candidates: Iterable[Candidate]) -> float:
    """Per hour, of all together."""
    return math.fsum(each.price_per_hour for each in candidates)


def reaches(rate: float, target: float) -> bool:
    """Whether a sum of rates is at least the target, up to rounding."""
    return rate >= target * (1 - _ROUNDING)


def cheapest_first(candidates: Iterable[Candidate], target: float) -> list[Candidate]:
    """The paper's choice (§3.4): by rising c/mu until the target is reached; if all together do not reach it, all with a rate above 0.

    Rates 1.0, 0.5, 0.5 at 1.0, 0.6, 1.0 an hour, so rho = 1.0, 1.2, 2.0; target 1.4:
    the first alone makes 1.0; with the second 1.5 ≥ 1.4. Chosen: the first two, 1.6 an hour.

    The choice for a larger target contains that for a smaller one. The cost is below optimum + the last worker's price: if parts of workers
    could be rented, the same list with a part of the last one would be the optimum.
    """
    return until_reached((each for each in by_unit_price(candidates) if each.rate > 0), target)


def until_reached(ordered: Iterable[Candidate], target: float, rate: float = 0.0) -> list[Candidate]:
    """The first of `ordered` that together with `rate` reach the target; all of them if they do not."""
    chosen: list[Candidate] = []
    for each in ordered:
        if reaches(rate, target):
            break
        chosen.append(each)
        rate += each.rate
    return chosen


def choose_workers(candidates: Iterable[Candidate], target: float) -> list[Candidate]:
    """By rising c/mu, trying each worker as the last one; if all together do not reach the target, all with a rate above 0.

    Rates 0.9, 100, 0.1 at 0.9, 150, 0.3 an hour, so rho = 1.0, 1.5, 3.0; target 1.0:
    the paper's choice is the first two, 150.9 an hour; here the second is tried as the last one, and put aside;
    the first and the third make 1.0 as well, for 1.2 an hour.

    At most twice the optimum (Csirik, Frenk, Labbé and Zhang 1991). A worker that completes the list so far P is tried and put aside; any
    other joins P. Let j be the first worker of the optimum O that is put aside; P then holds all earlier workers of O. P does not reach the
    target, workers of O outside P cost at least rho_j per unit, workers of P outside O at most rho_j; so P costs less than O. j is in O, so
    c(P) + c_j ≤ 2·c(O). If no worker of O were put aside, P would hold all of O, but P never reaches the target. Leaving out workers that
    are not needed only lowers the cost.
    """
    if target <= 0:
        return []
    prefix: list[Candidate] = []
    rate = price = 0.0
    best: tuple[float, list[Candidate], Candidate] | None = None
    for each in by_unit_price(each for each in candidates if each.rate > 0):
        if reaches(rate + each.rate, target):
            if best is None or price + each.price_per_hour < best[0]:
                best = price + each.price_per_hour, prefix[:], each
        else:
            prefix.append(each)
            rate, price = rate + each.rate, price + each.price_per_hour
    return prefix if best is None else _without_idle([*best[1], best[2]], target)


def _without_idle(chosen: Sequence[Candidate], target: float) -> list[Candidate]:
    """Without the workers that the target does not need; the dearest per hour is left out first."""
    rate = total_rate(chosen)
    kept = []
    for each in sorted(chosen, key=lambda one: -one.price_per_hour):
        if reaches(rate - each.rate, target):
            rate -= each.rate
        else:
            kept.append(each)
    return by_unit_price(kept)


def choose_optimum(candidates: Iterable[Candidate], target: float) -> list[Candidate] | None:
    """The cheapest workers that reach the target; None if none do, or if the search would take more than about a second. Branch and bound
    over the number of each kind: workers of the same rate and price are one kind. A branch ends if its price, with the rest rented in parts
    at the best remaining rho, is not below the best price found. For the workers of `choose_workers`: 1.2 an hour, as that rule finds."""
    ordered = [each for each in by_unit_price(candidates) if each.rate > 0]
    if not reaches(total_rate(ordered), target):
        return None
    kinds = [list(same) for _, same in groupby(ordered, key=lambda each: (each.unit_price, each.rate))]
    if len(kinds) > _MOST_KINDS:
        return None
    best = choose_workers(ordered, target)
    best_price, num_nodes = total_price(best), 0

    def look(depth: int, counts: tuple[int, ...], rate: float, price: float) -> None:
        """Search all choices that begin with these counts of the first kinds, which rise by rho."""
        nonlocal best, best_price, num_nodes
        num_nodes += 1
        if num_nodes > _MOST_NODES:
            return
        if reaches(rate, target):
            if price < best_price * (1 - _ROUNDING):
                best_price = price
                best = [each for kind, count in zip(kinds, counts, strict=False) for each in kind[:count]]
            return
        if depth == len(kinds):
            return
        kind = kinds[depth]
        if price + (target - rate) * kind[0].unit_price >= best_price * (1 - _ROUNDING):
            return
        most = min(len(kind), math.ceil((target - rate) / kind[0].rate))
        for count in range(most, -1, -1):
            look(depth + 1, (*counts, count), rate + count * kind[0].rate, price + count * kind[0].price_per_hour)

    look(0, (), 0.0, 0.0)
    return best if num_nodes <= _MOST_NODES else None
