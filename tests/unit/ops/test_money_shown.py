"""Costs and the coordinator's decisions: on the screen, in the summary, in the report, in plain lines."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from echo_ops.report.page import report_page
from echo_ops.report.plain import PlainLines, closing_lines
from echo_ops.report.run_view import RunView
from echo_ops.report.screen import render
from echo_ops.report.summary import summarise_run
from echo_schemas.records import Control, KindCost, WorkerControl
from echo_settings import Settings
from echo_settings.public import public_config
from tests.unit.ops.views import empty_view, learning_view, step

REASON = "release dear-0: 20 rollouts/s without it are enough for 11"


def order(epoch: int, worker: str, time_s: float, *, active: bool, reason: str = REASON) -> Control:
    told = WorkerControl(active=active, reason=reason, figures={"rate": 40.0, "price_active": 1.25})
    return Control(run_id="demo", epoch=epoch, worker_id=worker, worker=told, issued_by="c", time_ms=round(1000 * time_s))


def priced_view() -> RunView:
    """Three steps of ten samples: workers 0.03 (idle 0.01, standby 0.005) and learner 0.01 each; the first has the start in it."""
    view = empty_view()
    costs = (KindCost(kind="dear", num_workers=1, busy=0.015, idle=0.01), KindCost(kind="cheap", num_workers=1, standby=0.005))
    for number in range(1, 4):
        learner = 1.01 if number == 1 else 0.01
        view.apply(replace(step(number, float(number), 0.5, cost=0.04), costs=costs, learner_cost=learner))
    view.apply(order(1, "dear-0", 2.5, active=False))
    view.apply(order(2, "a", 3.0, active=True, reason=""))
    view.apply(order(2, "b", 3.0, active=True, reason=""))
    return view


def test_the_summary_has_costs_by_kind_and_use_and_every_decision() -> None:
    summary = summarise_run(priced_view(), wall_s=9, outcome="finished", software={})
    cost = summary["cost"]
    assert (cost["total"], cost["learner"], cost["workers"]) == (pytest.approx(1.12), pytest.approx(1.03), pytest.approx(0.09))
    assert (cost["idle"], cost["standby"]) == (pytest.approx(0.03), pytest.approx(0.015))
    assert (cost["per_step"], cost["per_1000_trained"]) == (pytest.approx(0.04), pytest.approx(1000 * 1.12 / 30))
    assert cost["by_kind"]["dear"]["total"] == pytest.approx(0.075)
    first, second = summary["decisions"]
    assert (first["reason"], first["released"], first["figures"]["rate"]) == (REASON, ["dear-0"], 40.0)
    assert (second["reason"], second["activated"]) == ("activate a, b", ["a", "b"])


def test_without_a_price_nothing_is_said_of_money() -> None:
    view = empty_view()
    view.apply(replace(step(1, 1.0, 0.5), costs=(), learner_cost=0.0))
    summary = summarise_run(view, wall_s=9, outcome="finished", software={})
    assert summary["cost"] is None
    assert not any(line.startswith("cost:") for line in closing_lines(summary, "reward"))
    page = report_page(view, summary, public_config(Settings()), [], 0)
    assert "<h2>Cost</h2>" not in page
    assert "Decisions of the coordinator" not in page


def test_report_and_lines_say_what_it_cost_and_why_the_pool_changed() -> None:
    view = priced_view()
    summary = summarise_run(view, wall_s=9, outcome="finished", software={})
    page = report_page(view, summary, public_config(Settings()), [], 0)
    for words in ("<h2>Cost</h2>", "A step, and so a version: 0.04", "dear", "0.075", "Decisions of the coordinator", REASON, "rate 40"):
        assert words in page, words
    assert "cost: 1.12 in all, 0.04 a step, 37.33 per 1,000 trained samples; learner 1.03, workers 0.09 (idle 0.03, standby 0.015)" in (
        closing_lines(summary, "reward")
    )
    lines = PlainLines()
    news = list(lines.news(view))
    assert f"   2.5 s  coordinator: {REASON}" in news
    assert "   3.0 s  coordinator: activate a, b" in news
    assert not list(lines.news(view)), "each decision is one line"


def test_the_screen_shows_cost_so_far_and_the_newest_decisions() -> None:
    console = Console(width=160, height=40, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(priced_view(), 100.0, 160, 40, "logs", []))
    text = capture.get()
    for words in ("cost so far", "1.12, 0.04 a step", "0.03, 0.015", f"0:02 coordinator: {REASON}", "0:03 coordinator: activate a, b"):
        assert words in text, words


def test_decisions_from_before_the_command_are_not_shown() -> None:
    view = learning_view(3)
    view.started_ms = 10_000
    view.apply(order(1, "dear-0", 2.5, active=False))
    assert not view.decisions
