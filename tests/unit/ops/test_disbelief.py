"""A worker whose claims were not believed is named wherever a run is shown."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from echo_ops.report.plain import closing_lines
from echo_ops.report.run_view import RunView
from echo_ops.report.screen import render
from echo_ops.report.summary import summarise_run
from echo_schemas.records import DropReason
from tests.unit.ops.test_report_page import page_of
from tests.unit.ops.views import drop, learning_view

SENTENCE = "Other weights than claimed, or than asked for, were served by w-2 (3 trajectories dropped), w-<1> (1 trajectories dropped)."


def disbelieving_view() -> RunView:
    view = learning_view()
    record = drop(DropReason.WRONG_VERSION)
    for worker in ("w-2", "w-2", "w-<1>", "w-2"):
        view.apply(replace(record, worker_id=worker, time_ms=20_000))
    # The seq's own drop names nobody: its trajectories' do.
    view.apply(replace(record, what=None, worker_id=None, time_ms=20_000))
    return view


def drawn(view: RunView) -> str:
    written = io.StringIO()
    Console(width=200, height=50, file=written).print(render(view, 30.0, 200, 50, "logs", []))
    return written.getvalue()


def test_screen_summary_lines_and_page_name_it() -> None:
    view = disbelieving_view()
    summary = summarise_run(view, wall_s=30.0, outcome="finished", software={})
    assert summary["disbelieved"] == {"w-2": 3, "w-<1>": 1}
    assert SENTENCE in drawn(view)
    assert closing_lines(summary, "exact match")[-1] == SENTENCE
    assert SENTENCE.replace("<", "&lt;").replace(">", "&gt;") in page_of(view)


def test_nothing_is_said_where_everybody_is_believed() -> None:
    view = learning_view()
    view.apply(replace(drop(DropReason.WRONG_VERSION), worker_id=None, time_ms=20_000))
    assert view.disbelief() == ""
    assert "than claimed" not in drawn(view)
    assert "alarm" not in page_of(view).split("</style>")[1]
