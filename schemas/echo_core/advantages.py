"""Group-relative advantages (GRPO, arXiv 2402.03300 §4.1; ECHO-2 eq. 22)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from echo_schemas.records import RewardTerm

# Limits the advantages of a group whose rewards are nearly equal.
STD_EPSILON = 1e-6


class AdvantageScale(StrEnum):
    """The divisor of a group's centred rewards."""

    POPULATION = "population"
    """The group's standard deviation: sqrt(mean((r - mean)²))."""
    SAMPLE = "sample"
    """The estimated standard deviation of the distribution, with n - 1, as in TRL and verl: advantages are smaller by sqrt((n - 1) / n),
    6.5 % at 8 samples."""
    NONE = "none"
    """Nothing (Dr. GRPO, arXiv 2503.20783)."""


def total_reward(scores: Mapping[str, float], terms: Sequence[RewardTerm]) -> float:
    """Weighted sum of the rewards in force. Raises KeyError if a weighted required one is missing; a missing optional one counts 0."""
    total = 0.0
    for term in terms:
        if term.name in scores:
            total += term.weight * scores[term.name]
        elif term.is_awaited:
            raise KeyError(term.name)
        else:
            total += term.weight * (term.default or 0.0)
    return total


def group_advantages(rewards: npt.NDArray[np.float64], *, scale: AdvantageScale = AdvantageScale.POPULATION) -> npt.NDArray[np.float64]:
    """(r − mean) / (std + 1e-6) over one group, shape [n]. Equal rewards give exactly zero: such a group has no weight in its batch.

    Rewards 1, 0, 0, 0 give 1.73, -0.58, -0.58, -0.58 with the population's deviation, 1.50, -0.50, -0.50, -0.50 with the sample's."""
    if np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    if scale is AdvantageScale.NONE:
        return centred
    # Different rewards are at least two, so n - 1 is at least one.
    scaled: npt.NDArray[np.float64] = centred / (float(rewards.std(ddof=scale is AdvantageScale.SAMPLE)) + STD_EPSILON)
    return scaled


def has_signal(rewards: npt.NDArray[np.float64]) -> bool:
    """Whether a group's rewards differ at all."""
    return bool(np.ptp(rewards) > 0.0)
