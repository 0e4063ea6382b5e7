"""An outcome as plain data, and as a table."""

from __future__ import annotations

import math
from typing import Any

from echo_core.simulation.outcome import Outcome
from echo_core.simulation.scenario import Scenario


def as_plain(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """All figures as plain data, for JSON; infinite or unknown ones are null."""
    return {
        "steps": len(outcome.steps),
        "wanted_steps": outcome.wanted_steps,
        "seconds": outcome.seconds,
        "steps_per_s": outcome.steps_per_s,
        "rollouts_per_s": outcome.steps_per_s * outcome.rollouts_per_step,
        "bubble_ratio": outcome.bubble_ratio,
        "wait_s_per_period": finite(outcome.wait_s(scenario.policy.publication_period)),
        "staleness": list(outcome.staleness),
        "staleness_mean": outcome.staleness_mean,
        "staleness_max": outcome.staleness_max,
        "broadcast_s": outcome.broadcast_s,
        "cost_per_step": finite(outcome.cost_per_step),
        "cost": outcome.cost,
        "cost_by_kind": dict(outcome.cost_by_kind),
        "idle_cost": outcome.idle_cost,
        "mean_active": outcome.mean_active,
        "activated": outcome.num_activated,
        "released": outcome.num_released,
        "stale_groups": outcome.num_stale,
        "stale_share": outcome.stale_share,
        "redelivered_groups": outcome.num_redelivered,
        "length_ratio": outcome.bias.length,
        "difficulty_ratio": outcome.bias.difficulty,
    }


def table(scenario: Scenario, outcome: Outcome) -> list[tuple[str, str, str]]:
    """Rows of name, value and meaning."""
    policy, period = scenario.policy, scenario.policy.publication_period
    counts, total = outcome.staleness, max(1, sum(outcome.staleness))
    ages = "  ".join(f"{age}: {count / total:.1%}" for age, count in enumerate(counts) if count)
    broadcast_s = outcome.broadcast_s
    idle_cost = outcome.idle_cost / len(outcome.steps) if outcome.steps else math.inf
    return [
        ("steps", f"{len(outcome.steps)}", f"in {outcome.seconds:,.0f} s of simulated time"),
        ("steps/s", f"{outcome.steps_per_s:.4g}", f"{outcome.steps_per_s * outcome.rollouts_per_step:.4g} rollouts/s trained"),
        ("bubble", f"{outcome.bubble_ratio:.1%}", "of the learner's time it waits"),
        ("wait", f"{outcome.wait_s(period):.4g} s", f"in each publication period of {period} steps"),
        ("staleness", ages or "–", f"versions, mean {outcome.staleness_mean:.2f}, budget {policy.budget}"),
        ("T_bcast", "–" if broadcast_s is None else f"{broadcast_s:.4g} s", "until enough workers have new weights, median"),
        ("cost/step", number(outcome.cost_per_step), f"of it {number(idle_cost)} for idle workers"),
        ("workers", f"{outcome.mean_active:.4g}", f"paid on average; {outcome.num_activated} activated, {outcome.num_released} released"),
        ("stale", f"{outcome.stale_share:.2%}", "of the groups were dropped for their age"),
        ("redelivered", f"{outcome.num_redelivered}", "groups began again on another worker"),
        (
            "bias",
            f"{outcome.bias.length:.3f}",
            f"length of trained groups relative to requested ones; difficulty {outcome.bias.difficulty:.3f}",
        ),
    ]


def number(value: float) -> str:
    """`value` with four digits, or ∞."""
    return f"{value:.4g}" if math.isfinite(value) else "∞"


def finite(value: float) -> float | None:
    """`value`; None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
