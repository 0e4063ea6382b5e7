"""What makes new weights arrive in time, where T_bcast is so long that no number of workers keeps the learner busy. Pure.

The conditions are those of `echo_core.capacity.overlap`: T_bcast below kappa · T_train, and below (S − kappa + 1) · T_train."""

from __future__ import annotations

import math

from echo_core.capacity.overlap import Demand


def arrival_limit_s(demand: Demand, publication_period: int, budget: int) -> float:
    """The seconds that T_bcast has to stay below: min(kappa, S − kappa + 1) · T_train.

    T_train = 963, kappa = 2, S = 3: both are 2 steps, 1926 s."""
    return min(publication_period, budget - publication_period + 1) * demand.train_s


def least_period_and_budget(demand: Demand, publication_period: int, every: int) -> tuple[int, int]:
    """The smallest kappa from `publication_period` on that `every`, the steps between checkpoints, divides, and the smallest budget S
    beside it, at which weights arrive in time.

    T_bcast = 6440, T_train = 963: a transfer takes 6.7 steps, so kappa = 7 and S = 7 + 7 − 1 = 13."""
    steps = math.floor(demand.broadcast_s / demand.train_s) + 1
    kappa = math.ceil(max(publication_period, steps) / every) * every
    return kappa, kappa + steps - 1


def least_mbit_s(num_bytes: float, load_s: float, limit_s: float) -> float:
    """A worker's line has to be faster than so many Mbit/s for `num_bytes` to arrive and be loaded, in `load_s`, within `limit_s`. Infinite
    where loading alone takes as long.

    8.04 GB, 4 s of loading, 1926 s: 64,400 Mbit in 1922 s, 33.5 Mbit/s."""
    return num_bytes * 8 / 1e6 / (limit_s - load_s) if limit_s > load_s else math.inf
