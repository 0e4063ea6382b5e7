"""What stands still or fails in a process: said at once, then at intervals, and on /healthz."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from echo_bus.clock import ManualClock, SystemClock
from echo_runtime.loop_watch import PLACE, LoopWatch
from echo_runtime.notices import STANDSTILL_S, Notices, Standstill
from echo_runtime.server import MetricsServer


def test_a_notice_is_logged_at_once_and_then_once_a_minute_even_if_it_comes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    notices = Notices(clock)
    for second in range(150):
        notices.say("reward judge", f"The judge is away, {second} s.")
        if second % 2:
            notices.clear("reward judge")
            assert not notices.current()
        clock.advance(1.0)
    assert [record.message for record in caplog.records] == [f"The judge is away, {second} s." for second in (0, 60, 120)]
    notices.say("reward judge", "Away.")
    clock.advance(59.0)
    assert notices.current() == {"reward judge": "Away."}
    clock.advance(1.0)
    assert not notices.current()


def test_a_place_says_why_it_does_not_move_once_it_has_not_for_long() -> None:
    clock = ManualClock()
    notices = Notices(clock)
    place = Standstill(notices, "batch", clock)
    clock.advance(STANDSTILL_S - 1)
    place.stands("No batch", lambda: "Nobody works.")
    assert not notices.current()
    clock.advance(1.0)
    place.stands("No batch", lambda: "Nobody works.")
    assert notices.current() == {"batch": "No batch for 20 s. Nobody works."}
    place.moves()
    place.stands("No batch", lambda: "Nobody works.")
    assert not notices.current()


def test_healthz_tells_of_notices_and_stays_green() -> None:
    server = MetricsServer(CollectorRegistry(), notices=lambda: {"learner": "No batch for 20 s."})
    # The address is our own server's.
    with server, urllib.request.urlopen(f"{server.url}/healthz") as answer:
        said = json.load(answer)
    assert (said["status"], said["notices"]) == ("ok", {"learner": "No batch for 20 s."})


def test_what_holds_an_event_loop_up_is_named_with_its_line() -> None:
    clock, notices = ManualClock(), Notices()
    inside, go_on = threading.Event(), threading.Event()

    def never_awaits() -> None:
        inside.set()
        go_on.wait(60)

    async def run(watch: LoopWatch) -> None:
        watch.start()
        await asyncio.sleep(0)
        assert watch.check() is None
        never_awaits()
        deadline_s = time.monotonic() + 60
        while watch.check() is not None:
            assert time.monotonic() < deadline_s, "waited for the loop to turn again"
            await asyncio.sleep(0.01)
        watch.close()

    code = never_awaits.__code__
    watch = LoopWatch(notices, clock, name=lambda frame: f"the reward 'judge' ({frame.f_lineno})" if frame.f_code is code else None)
    thread = threading.Thread(target=lambda: asyncio.run(run(watch)))
    thread.start()
    assert inside.wait(60)
    clock.advance(STANDSTILL_S)
    try:
        assert f"held up for 20 s by the reward 'judge' ({code.co_firstlineno + 2})" in str(watch.check())
        watch.look()
        assert "the reward 'judge'" in notices.current()[PLACE]
    finally:
        go_on.set()
        thread.join(60)
    assert not thread.is_alive()


def test_a_place_without_a_name_is_told_by_its_file_and_line() -> None:
    clock = ManualClock()
    watch = LoopWatch(Notices(SystemClock()), clock)
    clock.advance(STANDSTILL_S)
    assert "an unknown place" in str(watch.check())
