"""T_bcast: from a snapshot that is ready to enough workers that have it."""

from __future__ import annotations

import pytest

from echo_bus.clock import ManualClock
from echo_bus.requests.broadcast import BroadcastTimer
from echo_bus.requests.roster import Roster
from echo_schemas.records import WorkerState, WorkerStatus


def status(
    worker: str, clock: ManualClock, *, installed: int | None = None, state: WorkerState = WorkerState.READY, age_ms: int = 0
) -> WorkerStatus:
    return WorkerStatus(
        run_id="demo",
        worker_id=worker,
        host="h",
        engine="e",
        state=state,
        installed_version=installed,
        weights_sha256=None if installed is None else "0" * 64,
        time_ms=clock.time_ms() - age_ms,
    )


def roster_of(*statuses: WorkerStatus, clock: ManualClock) -> Roster:
    """Everybody was heard just now."""
    roster = Roster(heartbeat_s=1.0, group_size=4)
    for each in statuses:
        roster.heard(each, clock.monotonic_s())
    return roster


def timer_of(number: int, clock: ManualClock) -> BroadcastTimer:
    roster = roster_of(*(status(f"w{index}", clock) for index in range(number)), clock=clock)
    return BroadcastTimer(roster, clock, lambda _: None)


@pytest.mark.parametrize(("active", "needed"), [(1, 1), (2, 2), (10, 10), (11, 10), (22, 20)])
def test_enough_is_the_active_workers_over_gamma_rounded_up(active: int, needed: int) -> None:
    clock = ManualClock()
    timer = timer_of(active, clock)
    timer.ready(3)
    for number in range(needed):
        assert timer.last_s is None
        clock.advance(0.5)
        timer.on_worker(f"w{number}", status(f"w{number}", clock, installed=3))
    assert timer.last_s == 0.5 * needed


def test_who_is_gone_silent_or_standing_by_is_not_waited_for() -> None:
    clock = ManualClock()
    measured: list[float] = []
    roster = roster_of(status("silent", clock), clock=clock)
    clock.advance(60.0)
    # Its clock is an hour behind, which is nobody's affair.
    for each in (status("here", clock, age_ms=3_600_000), status("gone", clock, state=WorkerState.GONE)):
        roster.heard(each, clock.monotonic_s())
    roster.heard(status("standby", clock, state=WorkerState.STANDBY), clock.monotonic_s())
    timer = BroadcastTimer(roster, clock, measured.append)
    timer.ready(1)
    clock.advance(0.2)
    timer.on_worker("standby", status("standby", clock, installed=1, state=WorkerState.STANDBY))
    assert timer.last_s is None
    timer.on_worker("here", status("here", clock, installed=1))
    assert timer.last_s == pytest.approx(0.2)
    assert measured == [timer.last_s]


def test_one_worker_counts_once_an_older_version_not_at_all_a_newer_one_too() -> None:
    clock = ManualClock()
    timer = timer_of(2, clock)
    timer.on_worker("w0", status("w0", clock, installed=1))
    timer.ready(2)
    clock.advance(1.0)
    for worker, installed in (("w0", 1), ("w0", None), ("w1", 3), ("w1", 3)):
        timer.on_worker(worker, status(worker, clock, installed=installed))
    timer.on_worker("w2", None)
    assert timer.last_s is None
    clock.advance(1.0)
    timer.on_worker("w0", status("w0", clock, installed=2))
    assert timer.last_s == 2.0


def test_the_next_snapshot_starts_the_measurement_over() -> None:
    clock = ManualClock()
    timer = timer_of(1, clock)
    timer.ready(1)
    clock.advance(1.0)
    timer.ready(2)
    clock.advance(0.25)
    timer.on_worker("w0", status("w0", clock, installed=2))
    assert timer.last_s == 0.25


def test_without_workers_the_first_that_comes_is_enough() -> None:
    clock = ManualClock()
    timer = timer_of(0, clock)
    timer.ready(0)
    clock.advance(3.0)
    timer.on_worker("late", status("late", clock, installed=0))
    assert timer.last_s == 3.0
