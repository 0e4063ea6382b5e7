"""What a finished run has measured of itself, as the numbers that a plan needs. Reads `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_core.capacity.activation import Candidate
from echo_schemas.errors import UserError

SUMMARY = "summary.json"
# Workers of a run without kinds.
_NO_KIND = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """None: not measured. `workers`: those that have delivered something, each with its rate per busy second.

    A rate is what the worker was given to do, while it had something to do: one that could have had more groups at once makes more.
    """

    run: str
    train_s: float | None
    broadcast_s: float | None
    rollouts: int | None
    workers: tuple[Candidate, ...]
    learner_price_per_hour: float = 0.0
    cost_per_step: float | None = None


def read_measured_run(folder: Path) -> MeasuredRun:
    """From a run's folder, or the summary file itself. Raises UserError if there is none, or it is none."""
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
    """From the summary's keys. One that was written without T_train has it from the pace of its steps and the learner's waiting."""
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
    )


def _worker(line: Mapping[str, Any]) -> Candidate:
    return Candidate(
        worker_id=line["worker_id"],
        kind=line["kind"] or _NO_KIND,
        rate=line["samples_per_s"] / (1 - (line["idle_share"] or 0.0)),
        price_per_hour=line["price_per_hour"],
    )
