"""What each worker of a pool does, costs and delivers, and that screen, report and closing lines say it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from echo_ops.report.page import report_page
from echo_ops.report.plain import closing_lines
from echo_ops.report.pool import PoolView, WorkerLine, cost_per_1000
from echo_ops.report.run_view import RunView
from echo_ops.report.screen import render
from echo_ops.report.summary import summarise_run
from echo_schemas.records import WorkerShare, WorkerState, WorkerStatus
from echo_settings import Settings
from echo_settings.public import public_config
from tests.unit.ops.views import learning_view, status


def word(worker: str, time_s: float, *, rollouts: int, busy_s: float, **changes: Any) -> WorkerStatus:
    made = status(worker, time_s, version=1, busy_s=busy_s)
    return replace(made, rollouts=rollouts, kind=worker.partition("-")[0], price_per_hour=0.0, **changes)


def pool_of_two(*, until_s: float = 100.0) -> PoolView:
    """`fast` delivers 40 a second and is always busy, `slow` 10 and is busy half of the time; they cost 3.6 and 0.36 an hour."""
    pool = PoolView()
    for tick in range(int(until_s) + 1):
        pool.hear(replace(word("fast-0", tick, rollouts=40 * tick, busy_s=float(tick)), price_per_hour=3.6), tick)
        pool.hear(replace(word("slow-0", tick, rollouts=10 * tick, busy_s=0.5 * tick), price_per_hour=0.36), tick)
    pool.train([WorkerShare(worker_id="fast-0", staleness=(3, 1)), WorkerShare(worker_id="slow-0", staleness=(0, 0, 4))])
    pool.train([WorkerShare(worker_id="slow-0", staleness=(4,))])
    return pool


def line_of(pool: PoolView, worker: str, *, recent: bool = False) -> WorkerLine:
    return next(line for line in pool.lines(recent=recent) if line.worker_id == worker)


def test_a_workers_rate_share_idleness_staleness_and_cost() -> None:
    pool = pool_of_two()
    fast, slow = line_of(pool, "fast-0"), line_of(pool, "slow-0")
    assert (fast.samples_per_s, slow.samples_per_s) == (40.0, 10.0)
    assert (fast.share, slow.share) == (0.8, 0.2)
    assert (fast.idle_share, slow.idle_share) == (0.0, 0.5)
    assert (fast.staleness_mean, fast.staleness_max, fast.trained) == (0.25, 1, 4)
    assert (slow.staleness_mean, slow.staleness_max, slow.trained) == (1.0, 2, 8)
    # 0.1 for a hundred seconds and 4,000 trajectories; 0.01 for 1,000.
    assert fast.cost_per_1000 == pytest.approx(0.025)
    assert slow.cost_per_1000 == pytest.approx(0.01)
    assert cost_per_1000([fast, slow]) == pytest.approx(0.11 / 5)


def test_the_last_seconds_are_told_apart_from_the_whole() -> None:
    pool = pool_of_two()
    for tick in range(101, 131):
        pool.hear(word("slow-0", tick, rollouts=1000, busy_s=50.0), tick)
    recent = line_of(pool, "slow-0", recent=True)
    assert (recent.samples_per_s, recent.idle_share) == (0.0, 1.0)
    whole = line_of(pool, "slow-0").samples_per_s
    assert whole == pytest.approx(1000 / 130)


def test_a_worker_that_was_restarted_under_its_name_counts_on() -> None:
    pool = PoolView()
    pool.hear(word("w", 0, rollouts=0, busy_s=0.0), 0)
    pool.hear(word("w", 10, rollouts=100, busy_s=8.0), 10)
    pool.hear(word("w", 12, rollouts=0, busy_s=0.0, state=WorkerState.STARTING), 12)
    pool.hear(word("w", 20, rollouts=50, busy_s=6.0), 20)
    line = line_of(pool, "w")
    assert line.delivered == 150
    assert line.idle_share == pytest.approx(0.3)


def test_a_worker_that_has_no_weights_yet_has_no_rate_but_a_line() -> None:
    pool = PoolView()
    pool.hear(replace(word("w", 3, rollouts=0, busy_s=0.0, state=WorkerState.STARTING), installed_version=None, weights_sha256=None), 3)
    line = line_of(pool, "w")
    assert (line.samples_per_s, line.share, line.idle_share, line.staleness_mean, line.cost_per_1000) == (None,) * 5


def view_of_two() -> RunView:
    view = learning_view(30)
    view.pool = pool_of_two()
    return view


def shown(view: RunView, width: int, height: int = 40) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(view, 100.0, width, height, "logs", []))
    return capture.get()


def test_a_wide_screen_shows_every_column_and_a_narrow_one_the_most_asked_for() -> None:
    wide = shown(view_of_two(), 240)
    for words in ("kind", "engine", "samples/s", "share", "idle", "stale", "price/h", "per 1,000", "fast-0", "80%", "20%", "50%", "0.025"):
        assert words in wide, words
    narrow = shown(view_of_two(), 90)
    for words in ("worker", "samples/s", "share", "fast-0", "slow-0"):
        assert words in narrow, words
    assert "price/h" not in narrow


def test_workers_without_a_line_are_counted() -> None:
    view = learning_view(30)
    for number in range(40):
        for tick in (0, 10):
            view.pool.hear(word(f"w-{number:02}", tick, rollouts=10 * tick, busy_s=float(tick)), tick)
    text = shown(view, 160)
    assert "w-00" in text
    assert "w-39" not in text
    assert "more" in text


def test_report_and_closing_lines_say_what_each_worker_did_and_cost() -> None:
    view = view_of_two()
    summary = summarise_run(view, wall_s=120, outcome="finished", software={})
    assert [line["worker_id"] for line in summary["workers"]] == ["fast-0", "slow-0"]
    assert summary["cost_per_1000"] == pytest.approx(0.022)
    lines = closing_lines(summary, "reward")
    assert any(line.startswith("slow-0 (slow, vllm): 20% of the work, 10.0 samples/s, staleness 1.00") for line in lines), lines
    page = report_page(view, summary, public_config(Settings()), [], 0)
    for words in ("<h2>Workers</h2>", "slow-0", "20.0%", "50.0%", "cost 0.022 per 1,000"):
        assert words in page, words


def test_a_worker_that_is_not_heard_any_more_is_called_silent() -> None:
    view = view_of_two()
    view.pool.hear(replace(word("fast-0", 115, rollouts=4600, busy_s=115.0), price_per_hour=3.6), 115)
    console = Console(width=200, height=40, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(view, 116.0, 200, 40, "logs", []))
    rows = {name: line for line in capture.get().splitlines() for name in ("fast-0", "slow-0") if name in line}
    assert "ready" in rows["fast-0"]
    assert "silent" in rows["slow-0"]


def test_a_column_is_as_wide_as_what_stands_in_it() -> None:
    view = learning_view(30)
    for tick in (0, 10):
        view.pool.hear(
            replace(word("a-rather-long-name-of-a-worker-0", tick, rollouts=10 * tick, busy_s=float(tick)), price_per_hour=3.6), tick
        )
    for width in (100, 140, 180):
        text = shown(view, width)
        assert "a-rather-long-name-of-a-worker-0" in text
        assert "…" not in text
