"""Numbers of every step as curves: any metric of a report, over a range of versions, in as many points as a screen has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from echo_ops.viewer.windows import Json, number
from echo_replay.history import History
from echo_schemas.records import RewardStats, StepReport

_REWARD = "reward: "
_TOTAL = "total"


def values_of(report: StepReport) -> dict[str, float]:
    """Every number that a report states about its step, by name: its metrics, the mean of each reward, its times, its staleness."""
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
    """Of each reward, and of their sum where there are several: of a single one it is the same again."""
    found = list(report.reward_stats)
    return [stats for stats in found if stats.name != _TOTAL] if len(report.reward_terms) == 1 else found


def metrics_page(history: History, names: Sequence[str], first: int, last: int | None, most_points: int) -> Json:
    """The curves of `names` (empty: the rewards) over the versions `first` to `last`.

    More steps than `most_points` are put together in stretches of one length, each with its mean, least and most: of 2,500 steps and
    1,000 points, three steps to a point. `versions`: the newest of each stretch.
    """
    reports = [step.report for step in list(history.log.steps)]
    known: dict[str, None] = {}
    for report in reports:
        known.update(dict.fromkeys(values_of(report)))
    chosen = [report for report in reports if report.version >= first and (last is None or report.version <= last)]
    wanted = list(names) or [name for name in known if name.startswith(_REWARD)]
    rows = [values_of(report) for report in chosen]
    length = max(1, -(-len(rows) // most_points))
    return {
        "names": sorted(known),
        "steps_a_point": length,
        "versions": [chosen[min(at + length, len(chosen)) - 1].version for at in range(0, len(chosen), length)],
        "curves": {name: _curve(rows, name, length) for name in wanted if name in known},
        "unknown": [name for name in wanted if name not in known],
    }


def _curve(rows: Sequence[Mapping[str, float]], name: str, length: int) -> Json:
    values = np.array([row.get(name, np.nan) for row in rows], np.float64)
    values[~np.isfinite(values)] = np.nan
    mean: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for at in range(0, len(values), length):
        stretch = values[at : at + length]
        stretch = stretch[~np.isnan(stretch)]
        for column, value in ((mean, np.mean), (low, np.min), (high, np.max)):
            column.append(number(float(value(stretch))) if len(stretch) else None)
    return {"mean": mean} if length == 1 else {"mean": mean, "low": low, "high": high}
