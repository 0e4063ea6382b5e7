"""The live screen as text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from echo_ops.report.run_view import Milestone, RunView
from echo_ops.report.screen import Canvas, Screen, render
from echo_schemas.records import DropReason
from tests.unit.ops.views import drop, empty_view, learning_view


def text_of(view: RunView, width: int = 120, height: int = 36) -> str:
    console = Console(width=width, height=height, record=True, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(view, 30.0, width, height, "runs/demo/logs", ["Draining: feeder"]))
    return capture.get()


def test_the_screen_answers_what_a_user_asks() -> None:
    view = learning_view(30)
    view.apply(drop(DropReason.STALE))
    view.lags = {"requests open": 31}
    shown = text_of(view)
    for words in (
        *("step 30 of 40", "0.50 s a step", "0:05 to go", "mean of ten steps 0.765", "worker-0", "v30", "1 stale", "requests open"),
        *("bottleneck is generation, busy 90%", "Draining: feeder", "20 samples/s", "2.0e-05"),
    ):
        assert words in shown, words


def test_before_the_first_step_the_screen_is_a_checklist() -> None:
    view = empty_view()
    view.note(Milestone.KAFKA, 2.9)
    shown = text_of(view)
    assert "✓ Kafka answers" in shown
    assert "2.9 s" in shown
    for milestone in Milestone:
        assert view.words_of(milestone) in shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 60)])
@pytest.mark.parametrize("steps", [0, 1, 30])
def test_any_terminal_is_filled_and_not_overrun(width: int, height: int, steps: int) -> None:
    lines = text_of(learning_view(steps), width, height).splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_the_screen_is_drawn_only_when_due() -> None:
    times_s = [0.0]
    with Screen(Console(force_terminal=True, file=io.StringIO()), lambda: times_s[-1], "logs") as screen:
        due = [screen.is_due]
        screen.draw(learning_view(3))
        due.append(screen.is_due)
        times_s.append(2.0)
        due.append(screen.is_due)
    assert due == [True, False, True]


def test_a_line_keeps_the_time_at_which_it_was_said() -> None:
    drawn, times_s = io.StringIO(), [44.0]
    with Screen(Console(force_terminal=True, file=drawn, width=120, height=40), lambda: times_s[-1], "logs") as screen:
        screen.say("worker-0: Version 0 is not installed for 20 s.")
        times_s.append(144.0)
        screen.draw(learning_view(3))
    assert "0:44 worker-0: Version 0 is not installed for 20 s." in drawn.getvalue()


def test_a_rising_line_rises_from_the_lower_left_to_the_upper_right() -> None:
    canvas = Canvas(10, 4)
    canvas.line([(0.0, 0.0), (1.0, 1.0)], "green")
    rows = [row.plain for row in canvas.rows()]
    assert rows[0][-1] != " "
    assert rows[-1][0] != " "
    assert rows[0][0] == rows[-1][-1] == " "
    for column in range(10):
        assert any(row[column] != " " for row in rows)


def test_a_dot_outside_is_drawn_at_the_edge() -> None:
    canvas = Canvas(2, 1)
    canvas.dot(7.0, -3.0, "red")
    assert canvas.rows()[0].plain == " ⢀"
