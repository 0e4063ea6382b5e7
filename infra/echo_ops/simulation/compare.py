"""One scenario under several policies for old samples, or under several budgets, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from echo_core.policy import Admission, OverBudget, StalenessPolicy
from echo_core.simulation.fleet import simulate
from echo_core.simulation.outcome import Outcome
from echo_core.simulation.scenario import Scenario
from echo_ops.report.cards import Card
from echo_ops.simulation.figures import as_plain
from echo_ops.simulation.page import bars_card, render
from echo_schemas.errors import UserError

_BUDGETS = (1, 2, 3, 4, 6, 10)
COLUMNS = ("", "steps/s", "bubble", "cost/step", "staleness", "oldest", "not trained", "length", "difficulty")

_FIGURES: tuple[tuple[str, str, Callable[[Outcome], float]], ...] = (
    ("Bubble", "Share of the learner's time that it waits.", lambda outcome: outcome.bubble_ratio),
    ("Cost", "Cost of a step.", lambda outcome: outcome.cost_per_step),
    ("Bias by length", "How much shorter trained groups are than requested ones.", lambda outcome: 1 - outcome.bias.length),
    ("Bias by difficulty", "How much easier they are.", lambda outcome: 1 - outcome.bias.difficulty),
)


class Compared(StrEnum):
    """What differs between the variants."""

    POLICIES = "policies"
    BUDGETS = "budgets"


def variants(scenario: Scenario, compared: Compared) -> dict[str, Scenario]:
    """The variants by name. Each budget has its default publication period, as in a run's file without one."""
    policy = scenario.policy
    changed: Mapping[str, StalenessPolicy]
    if compared is Compared.POLICIES:
        paced = {each.value: replace(policy, admission=Admission.PACE, over_budget=each) for each in OverBudget}
        changed = {**paced, "free": replace(policy, admission=Admission.FREE, over_budget=OverBudget.DROP, lead=None)}
    else:
        changed = {f"S = {each}": replace(policy, budget=each, publication_period=max(1, each - 1), lead=None) for each in _BUDGETS}
    return {name: replace(scenario, policy=each) for name, each in changed.items()}


def compare(scenario: Scenario, compared: Compared) -> dict[str, tuple[Scenario, Outcome | UserError]]:
    """Each variant's outcome, or why it cannot run."""
    return {name: (each, _outcome(each)) for name, each in variants(scenario, compared).items()}


def _outcome(scenario: Scenario) -> Outcome | UserError:
    try:
        return simulate(scenario)
    except UserError as exc:
        return exc


def plain(found: Mapping[str, tuple[Scenario, Outcome | UserError]]) -> dict[str, Any]:
    """The outcomes as plain data, for JSON."""
    return {
        name: {"error": outcome.message} if isinstance(outcome, UserError) else as_plain(scenario, outcome)
        for name, (scenario, outcome) in found.items()
    }


def rows(found: Mapping[str, tuple[Scenario, Outcome | UserError]]) -> list[tuple[str, ...]]:
    """The rows of a table with `COLUMNS`. Length and difficulty: of the trained groups, relative to the requested ones."""
    made = []
    for name, (_, outcome) in found.items():
        if isinstance(outcome, UserError):
            made.append((name, outcome.message, *[""] * (len(COLUMNS) - 2)))
            continue
        made.append(
            (
                name,
                f"{outcome.steps_per_s:.4g}",
                f"{outcome.bubble_ratio:.1%}",
                f"{outcome.cost_per_step:.4g}",
                f"{outcome.staleness_mean:.2f}",
                f"{outcome.staleness_max}",
                f"{outcome.stale_share:.2%}",
                f"{outcome.bias.length:.3f}",
                f"{outcome.bias.difficulty:.3f}",
            )
        )
    return made


def compare_page(name: str, compared: Compared, found: Mapping[str, tuple[Scenario, Outcome | UserError]]) -> str:
    outcomes = {key: outcome for key, (_, outcome) in found.items() if isinstance(outcome, Outcome)}
    text = "Length and difficulty: of the trained groups, relative to the requested ones."
    cards = [Card("Figures", text, columns=COLUMNS, rows=rows(found), is_wide=True)]
    for title, text, figure in _FIGURES:
        cards.append(bars_card(title, text, [(key, figure(each)) for key, each in outcomes.items()], x_label=title.lower()))
    return render(f"{name}: {compared.value}", "One scenario in simulated time, changed in one thing", [], cards)
