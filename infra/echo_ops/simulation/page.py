"""One HTML page of a simulation, without scripts and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from echo_core.simulation.outcome import Outcome
from echo_core.simulation.scenario import Scenario
from echo_ops.report.svg import Bar, Frame, Line, chart
from echo_ops.simulation.figures import table

_NUM_AGES = 5
COLOURS = ("green", "blue", "violet", "amber", "red")
# A page stays small: more steps than this are drawn as one bar for several.
_MOST_BARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One picture or table, with what it shows in words."""

    title: str
    text: str
    svg: str = ""
    legend: Sequence[tuple[str, str]] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    is_wide: bool = False


def render(title: str, subtitle: str, answers: Sequence[str], cards: Sequence[Card]) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("echo_ops.simulation", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    css = resources.files("echo_ops.report").joinpath("page.css").read_text(encoding="utf-8")
    shown: list[Mapping[str, Any]] = [
        {
            "title": card.title,
            "text": card.text,
            "svg": Markup(card.svg),  # noqa: S704  made by `chart`, which escapes
            "legend": [(name, f"--{colour}") for name, colour in card.legend],
            "columns": card.columns,
            "rows": card.rows,
            "is_wide": card.is_wide,
        }
        for card in cards
    ]
    return environment.get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        answers=answers,
        cards=shown,
        css=Markup(css),  # noqa: S704  our own file
    )


def bars_card(title: str, text: str, values: Sequence[tuple[str, float]], *, x_label: str) -> Card:
    """A bar for each name, one under the other; below 0 there is none."""
    bars = [
        Bar(x0=0, x1=max(0.0, value), y0=len(values) - row - 0.85, y1=len(values) - row - 0.15, css="generate", tip=f"{key}: {value:.4g}")
        for row, (key, value) in enumerate(values)
    ]
    top = max([1e-9, *(value for _, value in values)])
    frame = Frame(x=(0, top), y=(0, len(values)), x_label=x_label, y_names=[key for key, _ in values], height=70 + 26 * len(values))
    return Card(title=title, text=text, svg=chart(frame, title=title, bars=bars))


def scenario_page(name: str, scenario: Scenario, outcome: Outcome) -> str:
    """Of one scenario."""
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
            css = f"age{min(age, _NUM_AGES - 1)}"
            bars.append(Bar(x0=step.version, x1=step.version + every, y0=base, y1=base + count, css=css, tip=tip))
            base += count
    top = max(sum(step.ages.values()) for step in shown)
    frame = Frame(x=(shown[0].version, shown[-1].version + every), y=(0, top), x_label="version", y_label="groups")
    legend = [(f"{age}" if age < _NUM_AGES - 1 else f"{age} and more", COLOURS[age]) for age in range(_NUM_AGES)]
    return Card(title="Staleness", text="Groups of each step by staleness.", svg=chart(frame, title="staleness", bars=bars), legend=legend)


def _waiting(outcome: Outcome) -> Card:
    points = [(float(step.version), step.waited_s) for step in outcome.steps]
    top = max([1.0, *(waited for _, waited in points)]) * 1.1
    frame = Frame(x=(points[0][0], points[-1][0] + 1), y=(0, top), x_label="version", y_label="seconds")
    lines = [Line(points=points, css="amber")]
    return Card(title="Waiting", text="Seconds that the learner waited before each step.", svg=chart(frame, title="waiting", lines=lines))


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
