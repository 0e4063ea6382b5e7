"""What stands still in a run is a line: after twenty seconds, then once a minute, with a cause."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from echo_ops.report.observer import scrape_notices
from echo_ops.report.run_view import RunView
from echo_ops.report.standstill import Standstills
from echo_runtime.server import MetricsServer
from echo_schemas.records import Progress, WorkerState
from echo_schemas.topics import PROGRESS
from tests.unit.ops.views import empty_view, example, status


def lines_over(view: RunView, seconds: int) -> list[tuple[int, str]]:
    """What is said in so many seconds in which nothing moves, and when."""
    standstills = Standstills()
    return [(second, line) for second in range(seconds) for line in standstills.news(view, float(second))]


def test_a_run_with_nothing_to_do_says_nothing() -> None:
    assert not lines_over(empty_view(), 100)


def test_requests_that_nobody_answers_are_told_with_what_the_workers_say() -> None:
    view = empty_view()
    view.lags = {"requests open": 12}
    said = lines_over(view, 100)
    assert [second for second, _ in said] == [20, 80]
    assert said[0][1].startswith("No trajectory has come for 20 s, and 12 requests are open. No worker is there")
    view.apply(status("worker-0", 1.0))
    assert "1 worker has 128 in hand" in lines_over(view, 21)[0][1]
    view.apply(status("worker-0", 2.0, in_flight=0))
    assert "1 worker is ready and has nothing in hand" in lines_over(view, 21)[0][1]
    view.apply(status("worker-1", 2.0, in_flight=0))
    assert "2 workers are ready and have nothing in hand" in lines_over(view, 21)[0][1]


def test_an_engine_that_starts_is_not_told_of_twice() -> None:
    """Its worker's own notice says for how long; that nothing is installed or answered meanwhile is no news."""
    view = empty_view()
    view.lags = {"requests open": 12}
    view.apply(replace(example(PROGRESS, Progress), published=0, version=0))
    starting = status("worker-0", 1.0, version=None, state=WorkerState.STARTING, in_flight=0)
    view.apply(starting)
    view.notices = {"worker-0": {"install": "Version 0 is not installed for 20 s. The engine is starting."}}
    lines = {line for _, line in lines_over(view, 100) if "learner" not in line}
    assert lines == {"worker-0: Version 0 is not installed for 20 s. The engine is starting."}
    view.apply(status("worker-0", 2.0, version=None, state=WorkerState.READY, in_flight=0))
    assert len({line.split()[1] for _, line in lines_over(view, 21)} & {"trajectory", "worker"}) == 2


def test_trajectories_that_nobody_scores_are_told_while_they_do_not_move() -> None:
    view, standstills = empty_view(), Standstills()
    view.lags = {"not yet scored": 7}
    said = []
    for second in range(60):
        view.rewards_written = min(second, 10)
        said += [(second, line) for line in standstills.news(view, float(second))]
    ((second, line),) = said
    assert second == 30
    assert "7 trajectories are not yet scored" in line


def test_weights_that_no_worker_installs_and_a_silent_learner_are_told() -> None:
    view = empty_view()
    view.apply(replace(example(PROGRESS, Progress), published=3, version=3))
    view.apply(status("worker-0", 1.0, version=1))
    first, second = sorted(line for _, line in lines_over(view, 21))
    assert "version 3 is published: worker-0 has v1" in first
    assert "The learner has not been heard of for 20 s" in second
    view.apply(status("worker-0", 2.0, version=3))
    assert not [line for _, line in lines_over(view, 21) if "installed" in line]


def test_workers_are_not_told_of_before_there_are_weights() -> None:
    view = empty_view()
    view.apply(status("worker-0", 1.0))
    view.apply(replace(example(PROGRESS, Progress), published=-1, version=0))
    assert not [line for _, line in lines_over(view, 21) if "installed" in line]


def test_what_a_role_says_of_itself_is_shown_once_a_minute() -> None:
    view = empty_view()
    view.notices = {"reward-0": {"event loop": "It is held up."}}
    assert lines_over(view, 70) == [(0, "reward-0: It is held up."), (60, "reward-0: It is held up.")]


def test_notices_are_read_from_a_process_that_is_well_or_not() -> None:
    problem: list[str | None] = [None]
    registry = CollectorRegistry()
    with MetricsServer(registry, healthy={"role": lambda: problem[0]}, notices=lambda: {"batch": "None for 20 s."}) as server:
        assert scrape_notices(server.url) == {"batch": "None for 20 s."}
        problem[0] = "It hangs."
        assert scrape_notices(server.url) == {"batch": "None for 20 s."}
    with MetricsServer(registry, healthy={"role": lambda: problem[0]}) as server:
        assert scrape_notices(server.url) == {"role": "It hangs."}
    assert scrape_notices(server.url) is None


def test_a_run_that_goes_on_is_not_silent_before_its_learner_is_there() -> None:
    view = empty_view()
    view.started_ms = example(PROGRESS, Progress).time_ms + 1
    view.apply(example(PROGRESS, Progress))
    view.lags = {"requests open": 12}
    assert not lines_over(view, 100)
    view.apply(replace(example(PROGRESS, Progress), time_ms=view.started_ms))
    assert len(lines_over(view, 21)) == 2
