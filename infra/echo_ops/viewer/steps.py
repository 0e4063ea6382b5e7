"""One step: the distributions of its rewards and ages, and its groups by the spread of their rewards. Pure.

The rewards come from the step's batch, so they are those that were trained on, with defaults; the page reads no trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from echo_ops.viewer.metrics import rewards_in, values_of
from echo_ops.viewer.windows import Json, Window, number
from echo_replay.history import History
from echo_replay.steps import Step
from echo_schemas.columns import FLAG_DTYPE, TOKEN_DTYPE, VALUE_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import Batch, StepReport

Values = npt.NDArray[np.float64]

# Bars of a histogram; a reward with fewer different values gets a bar for each.
_MOST_BARS = 24
SORTS = ("spread", "reward", "-reward", "batch")
"""Orders of the groups: largest spread first, smallest or largest mean first, or as in the batch."""


def find_step(history: History, version: int) -> Step:
    """The step that made `version`. Raises UserError if there is none."""
    if (found := history.log.step_of(version)) is not None:
        return found
    steps = list(history.log.steps)
    known = f"It has {steps[0].version} to {steps[-1].version}." if steps else "It has none yet."
    raise UserError(f"The log has no report of step {version} of {history.run_id}.", hint=known)


def steps_page(history: History, window: Window) -> Json:
    """A line for each step, the newest first."""
    steps = list(history.log.steps)[::-1]
    return {"window": window.plain(len(steps)), "steps": [_line(step.report) for step in window.of(steps)]}


def step_page(history: History, step: Step, batch: Batch | None, window: Window, sort: str = "spread") -> Json:
    """`batch`: None if it was deleted (`step.missing`); the page then shows the report only."""
    report = step.report
    versions = [each.version for each in list(history.log.steps)]
    page: Json = _line(report) | {
        "previous": max((each for each in versions if each < step.version), default=None),
        "next": min((each for each in versions if each > step.version), default=None),
        "checkpoint": report.checkpoint,
        "parent": report.parent,
        "session": report.session,
        "missing": step.missing,
        "metrics": {name: number(value) for name, value in sorted(values_of(report).items())},
        "reward_terms": [{"name": term.name, "weight": term.weight} for term in report.reward_terms],
        "staleness": {
            "total": list(report.staleness_total),
            "dispatch": list(report.staleness_dispatch),
            "in_flight": list(report.staleness_in_flight),
            "in_queue": list(report.staleness_in_queue),
        },
        "workers": [{"worker": each.worker_id, "staleness": list(each.staleness)} for each in report.workers],
        "histograms": {},
        "groups": [],
        "window": window.plain(0),
    }
    if batch is None:
        return page
    columns = rewards_of(report, batch)
    groups = _groups(step, batch, columns, sort)
    page["histograms"] = {name: histogram(values) for name, values in columns.items()}
    page["defaulted"] = {each.name: int(np.frombuffer(each.defaulted, FLAG_DTYPE).sum()) for each in batch.rewards}
    page["num_without_spread"] = sum(group["spread"] == 0 for group in groups)
    page |= {"groups": list(window.of(groups)), "window": window.plain(len(groups))}
    return page


def rewards_of(report: StepReport, batch: Batch) -> dict[str, Values]:
    """Each reward's values of all samples; if there are several rewards, also their weighted sum as `total`."""
    columns = {each.name: np.frombuffer(each.values, VALUE_DTYPE) for each in batch.rewards}
    weights = {term.name: term.weight for term in report.reward_terms}
    if len(columns) > 1:
        columns["total"] = np.sum([weights.get(name, 0.0) * values for name, values in columns.items()], axis=0)
    return columns


def histogram(values: Values) -> Json:
    """Counts by value (`values`) if there are few values, else in bars of equal width (`edges`).

    `[0, 1, 1, 1]` gives values [0, 1], counts [1, 3].
    """
    values = values[np.isfinite(values)]
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= _MOST_BARS:
        return {"values": different.tolist(), "counts": counts.tolist()}
    counts, edges = np.histogram(values, _MOST_BARS)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def neighbours(step: Step, seq: int) -> tuple[int | None, int | None]:
    """The seqs before and after `seq` in the step's batch."""
    seqs = list(dict.fromkeys(step.seqs.tolist()))
    if seq not in seqs:
        return None, None
    at = seqs.index(seq)
    return (seqs[at - 1] if at else None), (seqs[at + 1] if at + 1 < len(seqs) else None)


def _line(report: StepReport) -> Json:
    values = values_of(report)
    return {
        "version": report.version,
        "time_ms": report.time_ms,
        "num_samples": sum(report.staleness_total),
        "rewards": [{"name": s.name, "mean": number(s.mean), "std": number(s.std)} for s in rewards_in(report)],
        "staleness_mean": number(values.get("staleness_mean")),
        "staleness_max": number(values.get("staleness_max")),
        "idle_s": report.idle_s,
        "training_s": report.training_s,
    }


def _groups(step: Step, batch: Batch, columns: Mapping[str, Values], sort: str) -> list[Json]:
    total = columns.get("total", next(iter(columns.values()), np.zeros(batch.num_samples)))
    ends = np.cumsum(np.frombuffer(batch.group_sizes, TOKEN_DTYPE)).tolist()
    found = []
    for begin, end, attempt in zip([0, *ends], ends, batch.attempts, strict=False):
        inside, advantages = total[begin:end], step.advantages[begin:end]
        found.append(
            {
                "seq": int(step.seqs[begin]),
                "attempt": attempt,
                "num_samples": end - begin,
                "mean": number(float(inside.mean())),
                "spread": number(float(inside.std())),
                "values": [number(value) for value in inside[:_MOST_BARS].tolist()],
                "advantage_least": number(float(advantages.min())),
                "advantage_most": number(float(advantages.max())),
            }
        )
    keys = {"spread": lambda group: -(group["spread"] or 0.0), "reward": lambda group: group["mean"] or 0.0}
    keys["-reward"] = lambda group: -(group["mean"] or 0.0)
    return sorted(found, key=keys[sort]) if sort in keys else found
