"""One HTML page of a simulation, without scripts and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from echo_core.simulation.outcome import Outcome
from echo_core.simulation.scenario import Scenario
from echo_ops.report.cards import COLOURS, Card, fill_page
from echo_ops.report.svg import Bar, Frame, Line, chart
from echo_ops.simulation.figures import table

# With more steps one bar stands for several, to keep the page small.
_MOST_BARS = 400


def render(title: str, subtitle: str, answers: Sequence[str], cards: Sequence[Card]) -> str:
    return fill_page("echo_ops.simulation", title=title, subtitle=subtitle, answers=answers, cards=cards)


def bars_card(title: str, text: str, values: Sequence[tuple[str, float]], *, x_label: str) -> Card:
    """A bar for each name, one under the other; negative values have none."""
    bars = [
        Bar(x0=0, x1=max(0.0, value), y0=len(values) - row - 0.85, y1=len(values) - row - 0.15, css="generate", tip=f"{key}: {value:.4g}")
        for row, (key, value) in enumerate(values)
    ]
    top = max([1e-9, *(value for _, value in values)])
    frame = Frame(x=(0, top), y=(0, len(values)), x_label=x_label, y_names=[key for key, _ in values], height=70 + 26 * len(values))
    return Card(title=title, text=text, svg=chart(frame, title=title, bars=bars))


def scenario_page(name: str, scenario: Scenario, outcome: Outcome) -> str:
    """The page of one scenario."""
    policy = scenario.policy
    rows = table(scenario, outcome)
    cards = [Card(title="Figures", text="From the end of the warm-up on.", columns=("", "", ""), rows=rows, is_wide=True)]
    if outcome.steps:
        cards += [_ages(outcome), _waiting(outcome), _costs(scenario, outcome)]
    if outcome.broadcasts_s:
        cards.append(_broadcasts(outcome))
    answer = f"The learner waits for {outcome.bubble_ratio:.1%} of its time; a step costs {outcome.cost_per_step:.4g}."
    count = sum(kind.count for kind in scenario.kinds)
    subtitle = f"{count} workers in simulated time, S = {policy.budget}, kappa = {policy.publication_period}, seed {scenario.seed}"
    return render(f"Simulation of {name}", subtitle, [answer], cards)


def _ages(outcome: Outcome) -> Card:
    every = -(-len(outcome.steps) // _MOST_BARS)
    shown, bars = outcome.steps[::every], []
    for step in shown:
        base = 0.0
        for age, count in sorted(step.ages.items()):
            tip = f"step {step.version}: {count} groups of staleness {age}"
            css = f"age{min(age, len(COLOURS) - 1)}"
            bars.append(Bar(x0=step.version, x1=step.version + every, y0=base, y1=base + count, css=css, tip=tip))
            base += count
    top = max(sum(step.ages.values()) for step in shown)
    frame = Frame(x=(shown[0].version, shown[-1].version + every), y=(0, top), x_label="version", y_label="groups")
    legend = [(f"{age}{' and more' if age == len(COLOURS) - 1 else ''}", colour) for age, colour in enumerate(COLOURS)]
    return Card(title="Staleness", text="Groups of each step by staleness.", svg=chart(frame, title="staleness", bars=bars), legend=legend)


def _waiting(outcome: Outcome) -> Card:
    points = [(float(step.version), step.waited_s) for step in outcome.steps]
    top = max([1.0, *(waited for _, waited in points)]) * 1.1
    frame = Frame(x=(points[0][0], points[-1][0] + 1), y=(0, top), x_label="version", y_label="seconds")
    svg = chart(frame, title="waiting", lines=[Line(points=points, css="amber")])
    return Card("Waiting", "Seconds that the learner waited before each step.", svg)


def _costs(scenario: Scenario, outcome: Outcome) -> Card:
    num_steps = len(outcome.steps)
    learner = scenario.learner_price_per_hour * outcome.seconds / 3600 / num_steps
    parts = [*((kind, cost / num_steps) for kind, cost in outcome.cost_by_kind.items()), ("learner", learner)]
    parts = sorted(parts, key=lambda part: -part[1])[:12]
    return bars_card("Cost", "What a step costs, by kind of worker; the twelve largest.", parts, x_label="cost of a step")


def _broadcasts(outcome: Outcome) -> Card:
    points = [(float(number), seconds) for number, seconds in enumerate(outcome.broadcasts_s)]
    frame = Frame(x=(0, max(1.0, points[-1][0])), y=(0, max(y for _, y in points) * 1.1 or 1.0), x_label="publication", y_label="seconds")
    svg = chart(frame, title="T_bcast", lines=[Line(points=points, css="violet")])
    return Card(title="T_bcast", text="From each publication until enough workers had installed it.", svg=svg)
