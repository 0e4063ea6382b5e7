"""Group-relative advantages (GRPO, arXiv 2402.03300 §4.1; ECHO-2 eq. 22)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from echo_schemas.records import RewardTerm

# Keeps a group whose rewards are nearly equal from being blown up.
STD_EPSILON = 1e-6


def total_reward(scores: Mapping[str, float], terms: Sequence[RewardTerm]) -> float:
    """Weighted sum of the rewards in force. Raises KeyError if a weighted required one is missing; an optional one counts 0 then."""
    total = 0.0
    for term in terms:
        if term.name in scores:
            total += term.weight * scores[term.name]
        elif term.is_awaited:
            raise KeyError(term.name)
        else:
            total += term.weight * (term.default or 0.0)
    return total


def group_advantages(rewards: npt.NDArray[np.float64], *, scale_by_std: bool = True) -> npt.NDArray[np.float64]:
    """(r − mean) / (std + 1e-6) over one group, shape [n]. Equal rewards give exactly zero: such a group fills its place without weight."""
    if np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    scale = float(rewards.std()) + STD_EPSILON if scale_by_std else 1.0
    scaled: npt.NDArray[np.float64] = centred / scale
    return scaled


def has_signal(rewards: npt.NDArray[np.float64]) -> bool:
    """Whether a group's rewards differ at all."""
    return bool(np.ptp(rewards) > 0.0)
