"""What a sequential learner asked and was answered, as the summary, the last lines and the report tell it."""

from __future__ import annotations

from typing import Any

from echo_ops.report.page import report_page
from echo_ops.report.plain import closing_lines
from echo_ops.report.run_view import RunView
from echo_ops.report.summary import summarise_run
from echo_settings import Settings
from echo_settings.public import public_config
from tests.unit.ops.views import empty_view, learning_view, step

STEP = {"requests_sent": 33.0, "requests_resent": 1.0, "replies_accepted": 32.0, "replies_unfulfilled": 1.0, "replies_late": 0.0}


def asked_view() -> RunView:
    view = empty_view()
    for number in (1, 2):
        view.apply(step(number, float(number), 0.5, histogram=(10,), **STEP))
    return view


def summary_of(view: RunView) -> dict[str, Any]:
    return summarise_run(view, wall_s=30.0, outcome="finished", software={})


def test_requests_and_receipts_are_summed_over_the_steps() -> None:
    assert summary_of(asked_view())["asked"] == {
        "replies_accepted": 64,
        "replies_late": 0,
        "replies_unfulfilled": 2,
        "requests_resent": 2,
        "requests_sent": 66,
    }


def test_the_last_lines_name_them_and_leave_out_what_there_was_none_of() -> None:
    lines = closing_lines(summary_of(asked_view()), "exact")
    assert "requests: 66, 2 of them again; receipts: 64 accepted, 2 unfulfilled" in lines


def test_an_asynchronous_run_says_nothing_of_them() -> None:
    found = summary_of(learning_view())
    assert found["asked"] == {}
    assert not any(line.startswith("requests") for line in closing_lines(found, "exact"))


def test_the_report_accounts_for_them() -> None:
    view = asked_view()
    page = report_page(view, summary_of(view), public_config(Settings()), (), view.started_ms)
    assert "replies unfulfilled" in page
