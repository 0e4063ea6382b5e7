"""Evaluations on the screen, in the plain lines, in the summary and in the report."""

from __future__ import annotations

import re
from dataclasses import replace

from rich.console import Console

from echo_ops.report.evaluations import evaluation_line, over_versions
from echo_ops.report.page import report_page
from echo_ops.report.plain import PlainLines
from echo_ops.report.run_view import RunView
from echo_ops.report.screen import render
from echo_ops.report.summary import summarise_run
from echo_schemas.records import Eval, PassAtK, RewardStats
from echo_schemas.topics import EVALS
from echo_settings import Settings
from echo_settings.public import public_config
from tests.unit.ops.views import empty_view, example, step


def result(version: int, mean: float, *, name: str = "held-out", **changes: object) -> Eval:
    stats = RewardStats(name="exact", mean=mean, std=0.4, minimum=0.0, maximum=1.0, stderr=0.03)
    passes = (PassAtK(k=1, value=mean), PassAtK(k=4, value=min(1.0, mean + 0.3)))
    made = replace(example(EVALS, Eval), version=version, name=name, rewards=(stats,), pass_at=passes, time_ms=1000 * version + 500)
    return replace(made, **changes)  # type: ignore[arg-type]


def view_with(*results: Eval) -> RunView:
    view = empty_view()
    for number in range(1, 31):
        view.apply(step(number, float(number), number / 40))
    for each in results:
        view.apply(each)
    return view


RESULTS = (result(0, 0.05), result(20, 0.4, num_missing=3), result(10, 0.2), result(10, 0.9), result(20, 0.1, name="hard"))


def test_the_screen_shows_the_newest_of_each() -> None:
    console = Console(width=160, height=44, record=True, force_terminal=True)
    console.print(render(view_with(*RESULTS), 31.0, 160, 44, "logs", []))
    text = console.export_text()
    assert "held-out v20: exact 0.400 ± 0.030" in text
    assert "hard v20: exact 0.100" in text


def test_each_result_is_said_once_as_it_comes() -> None:
    view, lines = view_with(RESULTS[0]), PlainLines()
    said = [line for line in lines.news(view) if "evaluation" in line]
    assert said == ["   0.5 s  evaluation held-out  v0  exact 0.050 ± 0.030, pass@4 0.350  (64 prompts, 2.5 s)"]
    view.apply(RESULTS[1])
    assert [line for line in lines.news(view) if "evaluation" in line] == [f"  20.5 s  {evaluation_line(RESULTS[1])}"]
    assert "64 prompts, 3 missing" in evaluation_line(RESULTS[1])


def test_the_summary_has_each_version_once() -> None:
    summary = summarise_run(view_with(*RESULTS), wall_s=40.0, outcome="finished", software={})
    assert [(each["name"], each["version"]) for each in summary["evaluations"]] == [
        ("held-out", 0),
        ("held-out", 20),
        ("held-out", 10),
        ("hard", 20),
    ]
    assert summary["evaluations"][2]["rewards"] == {"exact": {"mean": 0.2, "stderr": 0.03}}, "the first of a version counts"


def test_the_report_draws_each_over_the_versions() -> None:
    view = view_with(*RESULTS)
    summary = summarise_run(view, wall_s=40.0, outcome="finished", software={})
    config = {**public_config(Settings()), "eval": [{"name": "held-out", "prompts": 64}, {"name": "<hard>"}]}
    page = report_page(view, summary, config, [], 0)
    assert page.count("<h2>Evaluation ") == 2
    assert "Version 20: exact 0.400 ± 0.030, pass@4 0.700." in page
    assert page.count("<h3>[[eval]]</h3>") == 2
    assert "&lt;hard&gt;" in page


def test_a_curve_has_a_point_and_an_error_for_each_version() -> None:
    drawn = over_versions([result(0, 0.05), result(10, 0.2), result(20, 0.4)])
    assert drawn.count("<circle") == 3
    assert len(re.findall(r'<rect class="age0"', drawn)) == 3
    assert len(re.findall(r"<polyline", drawn)) == 2, "the mean and pass@4; pass@1 is the mean"
    assert over_versions([result(0, 0.05)]).count("<circle") == 1


def test_the_page_of_an_unevaluated_run_says_nothing_of_it() -> None:
    view = view_with()
    summary = summarise_run(view, wall_s=40.0, outcome="finished", software={})
    assert "Evaluation" not in report_page(view, summary, public_config(Settings()), [], 0)
