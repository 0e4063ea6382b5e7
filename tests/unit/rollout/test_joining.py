"""A worker that starts: names of workers that are long gone leave `workers`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from echo_bus.clock import SystemClock
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.joining import Namesake, find_others, still_work
from echo_schemas.errors import UserError
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import WAIT_S, wait_until

DAY_MS = 24 * 3_600_000


def test_names_of_which_nothing_was_heard_for_a_day_are_taken_off_the_topic(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    now_ms = SystemClock().time_ms()
    said = {
        "host-1": ("demo", WorkerState.READY, now_ms - DAY_MS - 60_000),
        "host-2": ("other", WorkerState.GONE, now_ms - 30 * DAY_MS),
        "host-3": ("demo", WorkerState.GONE, now_ms - 60_000),
        "host-4": ("other", WorkerState.READY, now_ms),
        "host-5": ("demo", WorkerState.READY, now_ms),
    }
    for name, (run_id, state, time_ms) in said.items():
        status = WorkerStatus(run_id=run_id, worker_id=name, host="h", engine="e", state=state, time_ms=time_ms)
        swarm.publisher.publish(WORKERS, status).wait(WAIT_S)
    assert set(find_others(swarm.bus, "w", SystemClock()).long_gone) == {"host-1", "host-2"}
    assert find_others(swarm.bus, "w", SystemClock()).ready == {"host-5"}, "neither another run's worker nor one that has gone"
    assert find_others(swarm.bus, "host-5", SystemClock()).ready == frozenset()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    everybody = replace(swarm.bus, run_id=None)
    wait_until(lambda: len(everybody.newest(WORKERS, WorkerStatus)) == 4, "two names to go and the worker's own to come")
    assert set(everybody.newest(WORKERS, WorkerStatus)) >= {"host-3", "host-4", "host-5"}


def test_whether_others_still_work_their_next_word_tells_and_not_their_clocks(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm()

    def says(worker_id: str, state: WorkerState, time_ms: int) -> None:
        status = WorkerStatus(run_id="demo", worker_id=worker_id, host="h", engine="e", state=state, time_ms=time_ms)
        swarm.publisher.publish(WORKERS, status).wait(WAIT_S)

    now_ms = SystemClock().time_ms()
    says("dead", WorkerState.READY, now_ms)
    says("slow-clock", WorkerState.READY, now_ms - 3_600_000)
    ready = find_others(swarm.bus, "w", SystemClock()).ready
    assert ready == {"dead", "slow-clock"}
    monkeypatch.setattr("echo_rollout.joining._LEAST_S", 0.1)
    assert not still_work(swarm.bus, ready, threading.Event(), heartbeat_s=0.01), "nobody says anything any more"
    monkeypatch.setattr("echo_rollout.joining._LEAST_S", WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(still_work, swarm.bus, ready, threading.Event(), heartbeat_s=0.01)
        while not asked.done():
            says("slow-clock", WorkerState.READY, now_ms - 3_600_000)
        assert asked.result()
    assert not still_work(swarm.bus, frozenset(), threading.Event(), heartbeat_s=1.0)


def test_a_worker_that_is_told_to_end_listens_for_others_no_longer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"heartbeat_s": 10 * WAIT_S})
    status = WorkerStatus(run_id="demo", worker_id="dead", host="h", engine="e", state=WorkerState.READY, time_ms=SystemClock().time_ms())
    swarm.publisher.publish(WORKERS, status).wait(WAIT_S)
    worker = swarm.start_worker(ScriptedEngine())
    wait_until(lambda: {each.worker_id for each in swarm.statuses()} >= {"dead", "w0"}, "the worker to have come")
    worker.stop()


def test_a_worker_of_the_same_name_elsewhere_keeps_its_place(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()

    def says(worker_id: str, host: str, state: WorkerState = WorkerState.READY) -> None:
        status = WorkerStatus(run_id="demo", worker_id=worker_id, host=host, engine="e", state=state, time_ms=0)
        swarm.publisher.publish(WORKERS, status).wait(WAIT_S)

    says("w", "there")
    namesake = Namesake(swarm.bus, "w", "here")
    try:
        # What a predecessor had said before, what we say ourselves, what others say.
        namesake.check()
        for name, host, state in (("w", "here", WorkerState.READY), ("v", "there", WorkerState.READY), ("w", "there", WorkerState.GONE)):
            says(name, host, state)
        says("w", "over-there")
        wait_until(lambda: namesake._other, "the namesake")
        with pytest.raises(UserError, match=r"A worker named 'w' is at work on over-there") as raised:
            namesake.check()
        assert "--name" in str(raised.value.hint)
    finally:
        namesake.close()
