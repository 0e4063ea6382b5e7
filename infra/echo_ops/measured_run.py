"""The numbers that a plan needs, measured by a finished run. Reads `summary.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_core.capacity.activation import Candidate
from echo_schemas.errors import UserError

SUMMARY = "summary.json"
# The kind of all workers in a run without kinds.
_NO_KIND = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """An evaluation's result for a version: the mean of a reward, with its standard error."""

    version: int
    mean: float
    stderr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyCurve:
    """An evaluation of a run over its versions."""

    evaluation: str
    reward: str
    points: tuple[Accuracy, ...]
    """By version."""

    def best(self, most: int) -> list[Accuracy]:
        """At most `most` of the versions above 0 that were better than all before; the last of these is among them.

        0.2, 0.5, 0.4, 0.7 after 0, 10, 20, 30 steps: 0.5 after 10 and 0.7 after 30.
        """
        found: list[Accuracy] = []
        highest = float("-inf")
        for point in self.points:
            if point.mean > highest:
                highest = point.mean
                found += [point] if point.version else []
        every = max(1, -(-len(found) // most))
        return found[::-1][::every][::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """None: not measured. `workers`: those that delivered samples, each with its rate per busy second.

    A rate is a lower bound: with more groups at once a worker may make more samples.
    """

    run: str
    train_s: float | None
    broadcast_s: float | None
    rollouts: int | None
    workers: tuple[Candidate, ...]
    learner_price_per_hour: float = 0.0
    cost_per_step: float | None = None
    accuracy: AccuracyCurve | None = None
    """Of the evaluation that has the most versions."""


def read_measured_run(folder: Path) -> MeasuredRun:
    """From a run's folder, or the summary file itself. Raises UserError if it is missing or malformed."""
    path = folder / SUMMARY if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return measured_run(found)
    except OSError as exc:
        raise UserError(
            f"There is no summary of a run in {folder}: {exc.strerror}.",
            hint="Name the folder of a run that `echoswarm up` or `demo` has ended.",
        ) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UserError(f"{path} is not the summary of a run.", hint="Name the folder of a run, or its summary.json.") from exc


def measured_run(summary: Mapping[str, Any]) -> MeasuredRun:
    """From the summary's keys. Without T_train it is computed from the time of a step and the learner's waiting."""
    steps = int(summary["steps"])
    train_s = summary.get("t_train_p50_s")
    if train_s is None and summary["s_per_step"] is not None and summary["bubble_ratio"] is not None:
        train_s = summary["s_per_step"] * (1 - summary["bubble_ratio"])
    rollouts = summary.get("rollouts_per_step")
    if rollouts is None and steps:
        rollouts = summary["trajectories_trained"] / steps
    broadcast_s = summary["t_bcast_p50_s"]
    cost = summary.get("cost") or {}
    return MeasuredRun(
        run=str(summary["run"]),
        train_s=None if train_s is None else float(train_s),
        broadcast_s=None if broadcast_s is None else float(broadcast_s),
        rollouts=None if rollouts is None else round(rollouts),
        workers=tuple(_worker(line) for line in summary["workers"] if line["samples_per_s"] and (line["idle_share"] or 0) < 1),
        learner_price_per_hour=float(cost.get("learner_per_hour") or 0.0),
        cost_per_step=cost.get("per_step"),
        accuracy=_curve(summary.get("evaluations") or ()),
    )


def _curve(evaluations: Sequence[Mapping[str, Any]]) -> AccuracyCurve | None:
    counts = Counter(each["name"] for each in evaluations)
    if not counts:
        return None
    ((name, _),) = counts.most_common(1)
    mine = sorted((each for each in evaluations if each["name"] == name), key=lambda each: int(each["version"]))
    # Summaries of earlier releases do not name the reward of the curve.
    reward = mine[0].get("shown") or next(iter(mine[0]["rewards"]))
    points = (
        Accuracy(version=int(each["version"]), mean=float(each["rewards"][reward]["mean"]), stderr=float(each["rewards"][reward]["stderr"]))
        for each in mine
    )
    return AccuracyCurve(evaluation=name, reward=reward, points=tuple(points))


def _worker(line: Mapping[str, Any]) -> Candidate:
    return Candidate(
        worker_id=line["worker_id"],
        kind=line["kind"] or _NO_KIND,
        rate=line["samples_per_s"] / (1 - (line["idle_share"] or 0.0)),
        price_per_hour=line["price_per_hour"],
    )
