"""Two rewards on the same samples: how much training on one would differ from training on the other. Pure.

group 7    exact 1 0 0 1    brevity 0.5 0.1 0.5 0.1
advantages       + - - +            +   -   +   -      half of the signs flip
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_core.advantages import group_advantages, has_signal
from echo_schemas.records import Coordinates, Reward

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of one reward over the matched samples."""

    mean: float
    std: float
    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rewards a and b on `num_matched` samples of `num_groups` whole or partial groups of at least two. None: not defined for these values.

    `rank_within`: mean Spearman correlation over groups in which both vary. `flipped`: share of samples whose two advantages have opposite
    signs, among samples with two non-zero advantages. `flat_*`: share of groups with equal values only. `confusion` and `kappa` (Cohen
    1960) if all values are 0 or 1: counts of (a, b) = (0, 0), (0, 1), (1, 0), (1, 1).
    """

    num_matched: int
    num_a: int
    num_b: int
    a: Moments
    b: Moments
    pearson: float | None
    spearman: float | None
    mae: float
    confusion: tuple[int, int, int, int] | None
    kappa: float | None
    num_groups: int
    rank_within: float | None
    flipped: float | None
    flat_a: float | None
    flat_b: float | None
    flat_either: float | None


def compare(first: Sequence[Reward], second: Sequence[Reward]) -> Comparison | None:
    """Compare rewards of the same trajectory; the first value of each counts. None if no sample has both."""
    a_of, b_of = _by_place(first), _by_place(second)
    places = sorted(a_of.keys() & b_of.keys(), key=lambda where: (where.partition, where.offset))
    if not places:
        return None
    a, b = (np.array([found[where].value for where in places], np.float64) for found in (a_of, b_of))
    numbers: dict[tuple[str, str], int] = {}
    members = [numbers.setdefault((a_of[where].group_id, a_of[where].attempt), len(numbers)) for where in places]
    return compare_columns(a, b, np.array(members), num_a=len(a_of), num_b=len(b_of))


def compare_columns(a: Floats, b: Floats, members: npt.NDArray[np.int64], *, num_a: int, num_b: int) -> Comparison | None:
    """`compare` for columns of samples that have both values; `members`: the number of each sample's group. None if they are empty."""
    if not len(a):
        return None
    order = np.argsort(members, kind="stable")
    borders = np.flatnonzero(np.diff(members[order])) + 1
    groups = [group for group in np.split(order, borders) if len(group) > 1]
    signs_a, signs_b = (
        np.concatenate([np.sign(group_advantages(values[group])) for group in groups] or [np.zeros(0)]) for values in (a, b)
    )
    both = (signs_a != 0) & (signs_b != 0)
    flat_a, flat_b = (np.array([not has_signal(values[group]) for group in groups], bool) for values in (a, b))
    ranks = [found for group in groups if (found := _pearson(_ranks(a[group]), _ranks(b[group]))) is not None]
    confusion = _confusion(a, b)
    return Comparison(
        num_matched=len(a),
        num_a=num_a,
        num_b=num_b,
        a=_moments(a),
        b=_moments(b),
        pearson=_pearson(a, b),
        spearman=_pearson(_ranks(a), _ranks(b)),
        mae=float(np.abs(a - b).mean()),
        confusion=confusion,
        kappa=None if confusion is None else _kappa(confusion),
        num_groups=len(groups),
        rank_within=float(np.mean(ranks)) if ranks else None,
        flipped=float((signs_a[both] != signs_b[both]).mean()) if both.any() else None,
        flat_a=_share(flat_a),
        flat_b=_share(flat_b),
        flat_either=_share(flat_a | flat_b),
    )


def _by_place(rewards: Sequence[Reward]) -> Mapping[Coordinates, Reward]:
    found: dict[Coordinates, Reward] = {}
    for reward in rewards:
        if reward.value is not None:
            found.setdefault(reward.of, reward)
    return found


def _moments(values: Floats) -> Moments:
    return Moments(mean=float(values.mean()), std=float(values.std()), minimum=float(values.min()), maximum=float(values.max()))


def _pearson(a: Floats, b: Floats) -> float | None:
    """None if one of them does not vary."""
    if np.ptp(a) == 0.0 or np.ptp(b) == 0.0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Ranks from 0; equal values have the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(counts) - counts
    ranks: Floats = (first + (counts - 1) / 2)[places]
    return ranks


def _confusion(a: Floats, b: Floats) -> tuple[int, int, int, int] | None:
    if not (np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all()):
        return None
    counts = np.bincount((2 * a + b).astype(np.int64), minlength=4)
    return int(counts[0]), int(counts[1]), int(counts[2]), int(counts[3])


def _kappa(confusion: tuple[int, int, int, int]) -> float | None:
    """Agreement beyond chance, (observed − expected) / (1 − expected); None if expected is 1."""
    neither, only_b, only_a, both = confusion
    total = sum(confusion)
    observed = (neither + both) / total
    ones_a, ones_b = (only_a + both) / total, (only_b + both) / total
    expected = ones_a * ones_b + (1 - ones_a) * (1 - ones_b)
    return None if math.isclose(expected, 1.0) else (observed - expected) / (1 - expected)


def _share(flags: npt.NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if flags.size else None
