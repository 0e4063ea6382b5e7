"""Deadlines are the asker's: clocks that are far apart, or step, cost a few requests and not the run."""

from __future__ import annotations

import pytest

from echo_bus.clock import ManualClock
from echo_rollout.holding import _NUM_HEARD, AskersTime
from echo_schemas.records import Purpose, RolloutRequest, Sampling

HOUR_MS = 3_600_000
TIMEOUT_MS = 20_000


class Machine(ManualClock):
    """A clock whose wall time can be set."""

    off_ms = 0

    def time_ms(self) -> int:
        return super().time_ms() + self.off_ms


def request(issued_ms: int, *, purpose: Purpose = Purpose.TRAIN, has_deadline: bool = True) -> RolloutRequest:
    return RolloutRequest(
        run_id="r",
        group_id="r/1",
        seq=1,
        purpose=purpose,
        task="t",
        group_size=2,
        sampling=Sampling(max_new_tokens=4, temperature=1.0),
        required_version=0,
        learner_version=0,
        issued_ms=issued_ms,
        deadline_ms=issued_ms + TIMEOUT_MS if has_deadline else None,
    )


def left_s(time: AskersTime, asked: RolloutRequest) -> float:
    time.heard(asked)
    left = time.left_s(asked)
    assert left is not None
    return left


def test_time_passes_between_coming_and_starting() -> None:
    clock = Machine()
    time, asked = AskersTime(clock), request(clock.time_ms())
    assert left_s(time, asked) == pytest.approx(20)
    clock.advance(15)
    assert time.left_s(asked) == pytest.approx(5)
    clock.advance(6)
    assert time.left_s(asked) == pytest.approx(-1)


def test_a_request_that_lay_too_long_has_no_time_left() -> None:
    clock = Machine()
    time, asked = AskersTime(clock), request(clock.time_ms())
    clock.advance(30)
    assert left_s(time, asked) == pytest.approx(-10)


def test_a_request_without_a_deadline_has_all_the_time() -> None:
    clock = Machine()
    assert AskersTime(clock).left_s(request(clock.time_ms(), has_deadline=False)) is None


@pytest.mark.parametrize("off_ms", [HOUR_MS, -HOUR_MS])
def test_a_machine_that_is_an_hour_off_learns_it_from_a_few_requests(off_ms: int) -> None:
    clock = Machine()
    time = AskersTime(clock)
    found = [left_s(time, request(clock.time_ms() - off_ms)) for _ in range(_NUM_HEARD)]
    assert found[-1] == pytest.approx(20)
    # Ahead of the asker, it takes the first ones for old; behind, it believes the first.
    assert (found[0] < 0) == (off_ms > 0)


def test_setting_this_machines_clock_changes_nothing() -> None:
    clock = Machine()
    time, issued_ms = AskersTime(clock), clock.time_ms()
    clock.off_ms = HOUR_MS
    assert left_s(time, request(issued_ms)) == pytest.approx(20)


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_step_of_the_askers_clock_is_followed(step_ms: int) -> None:
    clock = Machine()
    time = AskersTime(clock)
    for _ in range(2 * _NUM_HEARD):
        assert left_s(time, request(clock.time_ms())) == pytest.approx(20)
    found = [left_s(time, request(clock.time_ms() + step_ms)) for _ in range(_NUM_HEARD)]
    assert found[-1] == pytest.approx(20)


def test_old_requests_among_new_ones_stay_old() -> None:
    clock = Machine()
    time, old = AskersTime(clock), request(clock.time_ms())
    clock.advance(30)
    for _ in range(_NUM_HEARD - 2):
        assert left_s(time, old) < 0
    assert left_s(time, request(clock.time_ms())) == pytest.approx(20)
    for _ in range(_NUM_HEARD - 1):
        assert left_s(time, old) < 0


def test_the_learners_clock_is_not_the_feeders() -> None:
    clock = Machine()
    time = AskersTime(clock)
    for _ in range(_NUM_HEARD):
        time.heard(request(clock.time_ms() + HOUR_MS, purpose=Purpose.EVAL))
    assert left_s(time, request(clock.time_ms())) == pytest.approx(20)
