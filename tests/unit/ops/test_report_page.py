"""The HTML report and its charts."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from echo_ops.report import charts
from echo_ops.report.page import report_page
from echo_ops.report.run_view import RunView
from echo_ops.report.spans import GenerationSpan
from echo_ops.report.summary import summarise_run
from echo_ops.report.svg import Bar, Frame, Line, chart, tick_text, ticks
from echo_settings import Settings
from echo_settings.public import public_config
from tests.unit.ops.views import empty_view, learning_view


class Outline(HTMLParser):
    """Checks that tags close in order, and counts them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.headings: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"h1", "h2"}:
            self.headings.append(data)


def page_of(view: RunView, *, config: dict[str, Any] | None = None, spans: list[GenerationSpan] | None = None, **summary: Any) -> str:
    found = summarise_run(view, wall_s=30.0, outcome="finished", software={"vllm": "0.32"}) | summary
    return report_page(view, found, config or public_config(Settings()), spans or [], view.started_ms)


def spans() -> list[GenerationSpan]:
    return [
        GenerationSpan(worker_id="worker-0", seq=seq, version=seq // 8, started_ms=15_000 + 50 * seq, finished_ms=15_600 + 50 * seq)
        for seq in range(60)
    ]


def test_the_page_is_well_formed_and_shows_every_chart() -> None:
    page = Outline(page_of(learning_view(), spans=spans()))
    assert page.open == []
    for heading in (
        "Exact match by version",
        "Staleness of trained samples",
        "Throughput",
        "Timeline",
        "Where the time goes",
        "Accounting",
    ):
        assert heading in page.headings
    assert "Eight steps, close up" in page.headings
    assert page.counts["svg"] == 8  # seven charts, and entropy


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing() -> None:
    page = page_of(learning_view(), spans=spans())
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=", page) == []
    assert re.findall(r"url\(|@import", page) == []
    assert len(page) < 300_000


def test_what_users_name_is_text_and_never_markup() -> None:
    evil = '<img src=x onerror="alert(1)">'
    view = learning_view()
    view.run_id = evil
    config = public_config(Settings())
    config["task"]["name"] = evil
    config["rewards"] = {evil: 1.0}
    page = page_of(
        view,
        config=config,
        spans=[GenerationSpan(worker_id=evil, seq=1, version=1, started_ms=17_000, finished_ms=18_000)],
        dropped={evil: 1},
    )
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=") >= 5
    assert Outline(page).open == []


def test_a_run_without_steps_says_so_instead_of_drawing() -> None:
    page = Outline(page_of(empty_view()))
    assert "No step was trained" in page.headings
    assert "svg" not in page.counts


def test_without_spans_there_is_no_close_up() -> None:
    assert "Eight steps, close up" not in Outline(page_of(learning_view())).headings


def test_numbers_that_were_not_measured_are_dashes() -> None:
    assert "<b>–</b>" in page_of(learning_view(5))  # 0.70 was never reached


def test_secrets_are_not_in_the_page() -> None:
    settings = Settings.model_validate({"registry": {"password": "hunter2"}, "kafka": {"client": {"sasl.password": "hunter2"}}})
    assert "hunter2" not in page_of(learning_view(), config=public_config(settings))


def test_a_chart_leaves_out_what_is_not_finite_and_keeps_every_point_inside() -> None:
    frame = Frame(x=(0.0, 10.0), y=(0.0, 1.0), x_label="x")
    svg = chart(
        frame,
        title="t",
        lines=[Line(points=[(0, 0.0), (5, math.nan), (10, 1.0)], css="mean")],
        bars=[Bar(x0=0, x1=1, y0=0, y1=1, css="busy")],
    )
    (points,) = re.findall(r'points="([^"]+)"', svg)
    pairs = [tuple(map(float, pair.split(","))) for pair in points.split()]
    assert len(pairs) == 2
    assert all(0 <= x <= frame.width and 0 <= y <= frame.height for x, y in pairs)
    assert pairs[0][1] > pairs[1][1]  # up is down


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 20, 40, 60, 80, 100]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (43.1, 47.8, [44, 45, 46, 47]), (3, 3, [3])],
)
def test_ticks_are_round_numbers_within_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (2e-5, "2e-05"), (12, "12")])
def test_tick_texts_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text


def test_groups_that_overlap_lie_in_lanes_of_their_own() -> None:
    view = learning_view()
    svg = charts.close_up(view, spans(), view.started_ms)
    boxes = [
        tuple(map(float, box))
        for box in re.findall(r'<rect class="age\d" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    ]
    assert len(boxes) == 60
    by_lane: dict[float, list[tuple[float, float]]] = {}
    for x, y, width, _ in boxes:
        by_lane.setdefault(y, []).append((x, x + width))
    for lane in by_lane.values():
        lane.sort()
        assert all(end <= start + 0.2 for (_, end), (start, _) in pairwise(lane))
