"""Numbers of every step as curves: any metric of a report, over a range of versions, in a limited number of points. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_ops.viewer.windows import Json, number
from echo_schemas.records import RewardStats, StepReport

_REWARD = "reward: "
_TOTAL = "total"


def values_of(report: StepReport) -> dict[str, float]:
    """Every number of a step report by name: its metrics, the mean of each reward, its times, its staleness."""
    ages = report.staleness_total
    num_samples = sum(ages)
    found = dict(report.metrics)
    found |= {f"{_REWARD}{stats.name}": stats.mean for stats in rewards_in(report)}
    found |= {"idle_s": report.idle_s, "training_s": report.training_s, "samples": float(num_samples)}
    if num_samples:
        found["staleness_mean"] = sum(age * count for age, count in enumerate(ages)) / num_samples
        found["staleness_max"] = float(max(age for age, count in enumerate(ages) if count))
    return found


def rewards_in(report: StepReport) -> list[RewardStats]:
    """The statistics of each reward and of their sum; without the sum if there is one reward, because it is the same."""
    found = list(report.reward_stats)
    return [stats for stats in found if stats.name != _TOTAL] if len(report.reward_terms) == 1 else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The shown part of the curves: versions `first` to `last` (None: to the newest), in at most `most_points` points."""

    first: int = 0
    last: int | None = None
    most_points: int = 800


def metrics_page(
    reports: Sequence[StepReport], names: Sequence[str], frame: Frame, others: Mapping[str, Sequence[StepReport]] | None = None
) -> Json:
    """The curves of `names` (empty: the rewards), and the same of other runs by name.

    More steps than `most_points` are grouped into stretches of one length, each with mean, minimum and maximum: of 2,500 steps and 1,000
    points, three steps per point. `versions`: the newest of each stretch.
    """
    known: dict[str, None] = {}
    for report in reports:
        known.update(dict.fromkeys(values_of(report)))
    wanted = list(names) or [name for name in known if name.startswith(_REWARD)]
    return {
        "names": sorted(known),
        **_curves(reports, [name for name in wanted if name in known], frame),
        "unknown": [name for name in wanted if name not in known],
        "others": {run: _curves(other, wanted, frame) for run, other in (others or {}).items()},
    }


def _curves(reports: Sequence[StepReport], names: Sequence[str], frame: Frame) -> Json:
    chosen = [each for each in reports if each.version >= frame.first and (frame.last is None or each.version <= frame.last)]
    rows = [values_of(report) for report in chosen]
    length = max(1, -(-len(rows) // frame.most_points))
    return {
        "steps_a_point": length,
        "versions": [chosen[min(at + length, len(chosen)) - 1].version for at in range(0, len(chosen), length)],
        "curves": {name: _curve(rows, name, length) for name in names},
    }


def _curve(rows: Sequence[Mapping[str, float]], name: str, length: int) -> Json:
    values = np.array([row.get(name, np.nan) for row in rows], np.float64)
    values[~np.isfinite(values)] = np.nan
    stretches = [values[at : at + length] for at in range(0, len(values), length)]
    known = [stretch[~np.isnan(stretch)] for stretch in stretches]
    columns: dict[str, Callable[..., Any]] = {"mean": np.mean} if length == 1 else {"mean": np.mean, "low": np.min, "high": np.max}
    return {name: [number(float(value(each))) if len(each) else None for each in known] for name, value in columns.items()}
