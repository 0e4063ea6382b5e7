"""The rate at which generation overlaps training completely, and the staleness that follows (ECHO-2 §3.3, Appendix A). Pure.

    T_train     seconds of a training step          R      rollouts of a step
    T_bcast     seconds from a published snapshot   kappa  steps between two published snapshots
                until workers generate with it      mu     rollouts per second of all active workers

The rule is conservative: it counts only samples generated after a snapshot has arrived. Samples that workers generate meanwhile with older
weights are trained too, if the budget admits them, so a run usually waits less than `wait_s` and its samples are younger than the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_core.capacity.costs import price_of
from echo_schemas.errors import UserError

GAMMA = 1.1
"""Safety factor on the smallest rate (ECHO-2 §4.3; the value of all its experiments)."""

# A quotient that is a whole number except for rounding must not become the next one.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The learner's demand on its workers. Raises UserError for impossible numbers."""

    train_s: float
    """T_train: seconds of a step without waiting; the paper takes the median of five steps."""
    broadcast_s: float
    """T_bcast: from a published snapshot until workers generate with it, loading included."""
    rollouts: int
    """R: rollouts of a step, groups per step · group size."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.train_s) and self.train_s > 0):
            raise UserError(f"A step cannot take {self.train_s:g} s.", hint="Give the seconds of a training step, such as 1600.")
        if not (math.isfinite(self.broadcast_s) and self.broadcast_s >= 0):
            raise UserError(f"Weights cannot take {self.broadcast_s:g} s to arrive.", hint="Give seconds; 0 if they arrive at once.")
        if self.rollouts < 1:
            raise UserError(f"A step cannot need {self.rollouts} rollouts.", hint="Give groups per step times group size, at least 1.")


def min_rate(demand: Demand, publication_period: int) -> float:
    """mu_min = kappa·R / (kappa·T_train − T_bcast), in rollouts/s (eq. 2); infinite where the denominator is not positive.

    T_train = 1631.2, T_bcast = 1437, R = 2048, kappa = 2:
    between two publications the learner trains for 3262.4 s, and new weights work for 3262.4 − 1437 = 1825.4 s of it;
    in that time 4096 rollouts are needed: 4096 / 1825.4 = 2.2439 rollouts/s."""
    useful_s = publication_period * demand.train_s - demand.broadcast_s
    return publication_period * demand.rollouts / useful_s if useful_s > 0 else math.inf


def staleness_bound(demand: Demand, publication_period: int, rate: float) -> float:
    """The largest staleness: kappa + ⌈(T_bcast + R/mu) / T_train⌉ − 1 (eq. 7). A whole number; infinite for a rate of 0.

    As in `min_rate`, with mu = 2.4683: R/mu = 829.7 s, so (1437 + 829.7) / 1631.2 = 1.39, rounded up 2;
    2 + 2 − 1 = 3: with weights every second step, no sample is more than three versions old.

    It holds if batches take the newest samples first, the time of a sample is small beside T_bcast (else add the slowest one's time to
    T_bcast), R rollouts arrive in R/mu seconds, and the rate is at least R/T_train.
    """
    if rate <= 0:
        return math.inf
    return publication_period + math.ceil((demand.broadcast_s + demand.rollouts / rate) / demand.train_s - _ROUNDING) - 1


def fresh_rate(demand: Demand, publication_period: int, budget: int) -> float:
    """The smallest mu whose `staleness_bound` is within the budget S: R / ((S − kappa + 1)·T_train − T_bcast); infinite if none is.

    It is eq. 7 solved for mu. T_train = 1631.2, T_bcast = 1437, R = 2048, kappa = 2, S = 3:
    the weights may be late by (3 − 2 + 1) · 1631.2 = 3262.4 s, of which their transfer takes 1437 s;
    2048 / 1825.4 = 1.1220 rollouts/s."""
    useful_s = (budget - publication_period + 1) * demand.train_s - demand.broadcast_s
    return demand.rollouts / useful_s if useful_s > 0 else math.inf


def needed_rate(demand: Demand, publication_period: int, budget: int, gamma: float = GAMMA) -> float:
    """gamma · max(min_rate, fresh_rate): the learner does not wait and no sample exceeds the budget; infinite if no rate suffices.

    As in `fresh_rate`: max(2.2439, 1.1220) = 2.2439; 1.1 times that: 2.4683 rollouts/s.
    With S = 2 instead of 3: fresh rate 2048 / (1631.2 − 1437) = 10.546; 1.1 times that: 11.600 rollouts/s."""
    return gamma * max(min_rate(demand, publication_period), fresh_rate(demand, publication_period, budget))


def wait_s(demand: Demand, publication_period: int, rate: float) -> float:
    """Seconds that the learner waits in each publication period: max(0, T_bcast + kappa·R/mu − kappa·T_train) (eq. 1); infinite at rate 0.

    T_bcast = 1830 (the paper's star, table 2), T_train = 1631.2, R = 2048, kappa = 2, mu = 2.6185:
    4096 / 2.6185 = 1564.3 s for the rollouts; 1830 + 1564.3 − 3262.4 = 131.9 s, as in the table."""
    if rate <= 0:
        return math.inf
    period_s = publication_period * demand.train_s
    return max(0.0, demand.broadcast_s + publication_period * demand.rollouts / rate - period_s)


def bubble_share(demand: Demand, publication_period: int, rate: float) -> float:
    """The bubble ratio that follows from `wait_s`: waiting / (waiting + training); 1 at rate 0.

    As in `wait_s`: 131.9 / (131.9 + 3262.4) = 0.039."""
    waiting_s = wait_s(demand, publication_period, rate)
    if math.isinf(waiting_s):
        return 1.0
    return waiting_s / (waiting_s + publication_period * demand.train_s)


def cost_per_step(demand: Demand, publication_period: int, rate: float, price_per_hour: float) -> float:
    """The cost of a step if all machines together cost `price_per_hour`; infinite at rate 0.

    8 workers of $0.35 and a learner of 4 · $3.06: $15.04 an hour; T_train = 1631.2 s and no waiting:
    15.04 · 1631.2 / 3600 = $6.81. With 131.9 s of waiting every second step: 15.04 · 1697.2 / 3600 = $7.09."""
    step_s = demand.train_s + wait_s(demand, publication_period, rate) / publication_period
    return price_of(price_per_hour, step_s) if price_per_hour else 0.0
