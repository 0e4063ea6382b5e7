"""One HTML page of `echoswarm plan`: the table, what a step and an accuracy cost, and how the learner's waiting falls with the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echo_core.capacity.overlap import Demand, bubble_share
from echo_core.capacity.provisioning import Provision, advice
from echo_ops.measured_run import AccuracyCurve, MeasuredRun
from echo_ops.report.cards import COLOURS, Card
from echo_ops.report.svg import Frame, Line, chart
from echo_ops.simulation.figures import number
from echo_ops.simulation.page import bars_card, render

MOST_LEVELS = 6
"""At most so many accuracies are shown."""
# The CSS classes of the curves; the first one is the default style.
_CSS = ("", "blue", "violet", "amber")
_NUM_POINTS = 60


def plan_page(
    demand: Demand, plans: Sequence[Provision], measured: MeasuredRun | None, *, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """`columns`, `rows`: the command's table."""
    text = f"T_train {demand.train_s:.4g} s, T_bcast {demand.broadcast_s:.4g} s, {demand.rollouts} rollouts a step."
    cards = [
        Card(title="Plans", text=text, columns=columns, rows=rows, is_wide=True),
        bars_card(
            "Cost of a step",
            "Workers and learner, waiting included.",
            [(_name(each), each.cost_per_step) for each in plans if math.isfinite(each.cost_per_step)],
            x_label="cost",
        ),
        _bubbles(demand, plans),
    ]
    if measured is not None and measured.accuracy is not None:
        cards += _accuracy(plans, measured, measured.accuracy)
    answers = [f"{_name(each)}: {advice(each, demand) or f'a step costs {number(each.cost_per_step)}.'}" for each in plans]
    return render(
        "A plan" if measured is None else f"A plan after {measured.run}", "By the rules of ECHO-2, nothing was run", answers, cards
    )


def accuracy_words(curve: AccuracyCurve) -> str:
    """The assumption behind the costs of an accuracy."""
    return (
        f"The cost of each accuracy of the run's evaluation {curve.evaluation!r} ({curve.reward}), if each step teaches as much as there. "
        f"In ECHO-2 that held within 5 % up to S = 6."
    )


def accuracy_rows(plans: Sequence[Provision], measured: MeasuredRun, curve: AccuracyCurve) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows: each accuracy that was better than all before, its number of steps, and their cost under each plan."""
    in_run = measured.cost_per_step
    head = (curve.reward, "steps", *(_name(each) for each in plans), *(["in the run"] if in_run is not None else []))
    rows = [
        (
            f"{point.mean:.3f} ± {point.stderr:.3f}",
            f"{point.version}",
            *(number(each.cost_per_step * point.version) for each in plans),
            *([number(in_run * point.version)] if in_run is not None else []),
        )
        for point in curve.best(MOST_LEVELS)
    ]
    return head, rows


def _name(plan: Provision) -> str:
    return f"S = {plan.limits.budget}"


def _legend(plans: Sequence[Provision]) -> list[tuple[str, str]]:
    return [(_name(each), colour) for each, colour, _ in zip(plans, COLOURS, _CSS, strict=False)]


def _bubbles(demand: Demand, plans: Sequence[Provision]) -> Card:
    targets = [each.target for each in plans if math.isfinite(each.target)]
    rates = [1.5 * max(targets, default=1.0) * (point + 1) / _NUM_POINTS for point in range(_NUM_POINTS)]
    lines = [
        Line(points=[(rate, bubble_share(demand, each.publication_period, rate)) for rate in rates], css=css)
        for each, css in zip(plans, _CSS, strict=False)
    ]
    frame = Frame(x=(0, rates[-1]), y=(0, 1), x_label="rollouts/s", y_label="bubble ratio")
    text = "Share of the learner's time without a batch, by what the workers make together. Needed: " + "; ".join(
        f"{_name(each)} {number(each.target)}/s" for each in plans
    )
    return Card(title="Bubble", text=text, svg=chart(frame, title="bubble", lines=lines), legend=_legend(plans))


def _accuracy(plans: Sequence[Provision], measured: MeasuredRun, curve: AccuracyCurve) -> list[Card]:
    costs = [each.cost_per_step for each in plans]
    last = curve.points[-1].version
    means = [point.mean for point in curve.points]
    top = max((cost for cost in costs if math.isfinite(cost)), default=0.0) * last
    frame = Frame(x=(0, top or 1.0), y=(min(0.0, *means), max(1.0, *means)), x_label="cost", y_label=curve.reward)
    lines = [
        Line(points=[(cost * point.version, point.mean) for point in curve.points], css=css) for cost, css in zip(costs, _CSS, strict=False)
    ]
    head, rows = accuracy_rows(plans, measured, curve)
    words = accuracy_words(curve)
    return [
        Card(title="Accuracy by cost", text=words, svg=chart(frame, title="accuracy", lines=lines), legend=_legend(plans)),
        Card(title="Cost of an accuracy", text="By the version that first was better than all before.", columns=head, rows=rows),
    ]
