"""The run in numbers, for `--summary`, the report and the closing lines. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from echo_core.bottleneck import describe
from echo_core.capacity.costs import Bill
from echo_ops.report.evaluations import summary_of
from echo_ops.report.pool import cost_per_1000, mean_age
from echo_ops.report.run_view import MEAN_OVER, Milestone, RunView
from echo_ops.rewards.watch import plain_line

GOAL = 0.70
"""`seconds_to_070` is the time when the mean reward over ten steps reached this."""


def summarise_run(view: RunView, *, wall_s: float, outcome: str, software: Mapping[str, str]) -> dict[str, Any]:
    """The summary's keys and values; None for values that were not measured. `wall_s`: from the command to its end."""
    rewards = [step.reward for step in view.steps]
    staleness = view.staleness()
    last = view.steps[-1].metrics if view.steps else {}
    bottleneck = view.bottleneck()
    lines = view.pool.lines()
    return {
        "run": view.run_id,
        "outcome": outcome,
        "steps": len(view.steps),
        "reward_first": _mean(rewards[:MEAN_OVER]),
        "reward_last": _mean(rewards[-MEAN_OVER:]),
        "seconds_to_first_step": view.milestones.get(Milestone.STEP),
        "wall_seconds": wall_s,
        "s_per_step": view.s_per_step(),
        "max_staleness": max((age for age, count in enumerate(staleness) if count), default=None),
        "dropped": dict(sorted(view.drops.items())),
        "asked": _asked(view),
        "disbelieved": dict(sorted(view.disbelieved.items())),
        "disbelief": view.disbelief(),
        "trajectories_published": view.trajectories_published,
        "trajectories_trained": sum(step.samples for step in view.steps),
        "bubble_ratio": view.bubble_ratio(),
        "t_train_p50_s": _median([step.training_s for step in view.steps[1:] or view.steps]),
        "rollouts_per_step": _median([step.samples for step in view.steps]),
        "t_bcast_p50_s": _broadcast_p50_s(view),
        "seconds_to_070": seconds_to(view, GOAL),
        "learner_outside_compute": _outside_compute(view),
        "logprob_max_diff": _logprob_difference(view),
        "logprob_samples": int(last.get("probe_samples", 0)),
        "staleness_mean": mean_age(staleness),
        "staleness": list(staleness),
        "samples_per_s": view.samples_per_s(len(view.steps)) if len(view.steps) > 1 else None,
        "bottleneck": {
            "place": None if bottleneck.place is None else bottleneck.place.value,
            "busy_share": bottleneck.busy_share,
            "learner_waits": bottleneck.learner_waits,
            "sentence": describe(bottleneck),
        },
        "places": {
            place.value: {"busy_s": use.busy_s, "empty_s": use.empty_s, "blocked_s": use.blocked_s}
            for place, use in view.place_use().items()
            if use.observed_s > 0
        },
        "startup_s": {milestone.name.lower(): time_s for milestone, time_s in view.milestones.items()},
        "workers": [{**asdict(line), "state": line.state.value} for line in lines],
        "cost_per_1000": cost_per_1000(lines) if any(line.cost for line in lines) else None,
        "cost": _cost(view.bill),
        "decisions": [{**asdict(each), "reason": each.in_words()} for each in view.decisions],
        "scorers": [plain_line(line) for line in view.scorers],
        "evaluations": [summary_of(result) for result in view.evaluations.all],
        "software": dict(software),
    }


def seconds_to(view: RunView, goal: float) -> float | None:
    """Seconds until the mean over ten steps first reached `goal`."""
    for index, mean in enumerate(view.mean_rewards()):
        if index + 1 >= MEAN_OVER and mean >= goal:
            return view.steps[index].time_s
    return None


def _asked(view: RunView) -> dict[str, int]:
    """A sequential learner's requests and replies, by the step metrics' names; empty in asynchronous mode."""
    counts: Counter[str] = Counter()
    for step in view.steps:
        counts.update({name: int(value) for name, value in step.metrics.items() if name.startswith(("requests_", "replies_"))})
    return dict(sorted(counts.items()))


def _cost(bill: Bill) -> dict[str, Any] | None:
    """The cost of the steps; None if nothing has a price."""
    if not bill.total:
        return None
    workers = bill.workers
    return {
        "total": bill.total,
        "learner": bill.learner,
        "learner_per_hour": bill.learner_per_hour,
        "workers": workers.total,
        "idle": workers.idle,
        "standby": workers.standby,
        "per_step": bill.per_step,
        "per_1000_trained": bill.per_1000,
        "by_kind": {kind: {**asdict(spent), "total": spent.total} for kind, spent in sorted(bill.kinds.items())},
    }


def _broadcast_p50_s(view: RunView) -> float | None:
    """Median T_bcast as the learner measured it, or from the log's times if it measured none."""
    measured: list[float] = []
    for step in view.steps:
        value = step.metrics.get("broadcast_s")
        if value is not None and (not measured or value != measured[-1]):
            measured.append(value)
    if not measured:
        measured = [max(b.installed_s.values()) - b.created_s for b in view.broadcasts() if b.version > 0 and b.installed_s]
    return _median(measured)


def _outside_compute(view: RunView) -> float | None:
    """Share of training time outside forward, backward and optimizer, without the first step (warm-up)."""
    steps = [step for step in view.steps[1:] if "outside_compute_share" in step.metrics]
    total = sum(step.training_s for step in steps)
    return sum(step.metrics["outside_compute_share"] * step.training_s for step in steps) / total if total > 0 else None


def _logprob_difference(view: RunView) -> float | None:
    """Largest difference between learner and worker on the probe groups; None without a comparison."""
    compared = [step.metrics["probe_logprob_diff_max"] for step in view.steps if step.metrics.get("probe_samples", 0) > 0]
    return max(compared) if compared else None


def or_dash(value: float | None, form: str, unit: str = "") -> str:
    """`value` in this format, with its unit; a dash for None."""
    return "–" if value is None else f"{value:{form}}{unit}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
