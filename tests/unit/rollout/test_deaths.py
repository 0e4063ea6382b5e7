"""Workers that die: at any call to the cluster, of a request, or not at all while Kafka is away. Nothing is lost, nobody waits for ever."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence

import pytest

from echo_memory import MemoryCluster
from echo_rollout.engines.engine import EngineError, Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Sampling
from echo_schemas.topics import REQUESTS, TRAJECTORIES
from tests.thorough import IS_THOROUGH
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, GatedEngine, Swarm, wait_until
from tests.unit.rollout.test_requests import committed, dead_letters, group_of

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_PARTITIONS = 8, 4
POISON = 5
SEED = 20
# Kills of a run that is not thorough, out of as many as a worker and a feeder have chances to die.
NUM_KILLS = 5
WORKER_CALLS, FEEDER_CALLS = 29, 24
# Polling is what a worker does most and changes nothing.
_KILLED_AT = frozenset({"produce", "flush", "commit", "subscribe", "list_topics", "offsets_for_times"})
_KILLED_AT |= {"init_transactions", "begin_transaction", "commit_transaction", "abort_transaction"}


def kills(num_calls: int) -> list[int]:
    """Each call once, or some of them."""
    every = range(1, num_calls + 1)
    return list(every) if IS_THOROUGH else sorted(random.Random(SEED).sample(every, NUM_KILLS))


class Killed(BaseException):
    """The process ends here: nothing catches it."""


class Kill:
    """The `number`-th call out of a worker's own threads does not come back, nor does any later one: a dead process calls nobody."""

    def __init__(self, number: int) -> None:
        self.num_calls = 0
        self._number = number
        self._dead = False
        self._lock = threading.Lock()

    def __call__(self, operation: str) -> None:
        # The test's own thread is the main one; clients and views have threads that only deliver.
        if not threading.current_thread().name.startswith(("requests", "publishing", "Thread-")) or operation not in _KILLED_AT:
            return
        with self._lock:
            self.num_calls += 1
            self._dead = self._dead or self.num_calls == self._number
            if self._dead:
                raise Killed


def ask_all(swarm: Swarm) -> None:
    for seq in range(NUM_REQUESTS):
        swarm.ask(swarm.request(seq, prompt_token_ids=pack_tokens([seq + 1])), partition=seq % NUM_PARTITIONS)


def whole_groups(swarm: Swarm) -> set[int]:
    """Seqs of which some attempt is complete in the log."""
    attempts: dict[tuple[int, str], set[int]] = {}
    for record in swarm.trajectories():
        attempts.setdefault((record.seq, record.attempt), set()).add(record.index)
    return {seq for (seq, _), indices in attempts.items() if indices == {0, 1}}


def assert_committed_is_done(swarm: Swarm, cluster: MemoryCluster) -> None:
    """What is committed is never delivered again, so it is in the log whole."""
    done = {partition + NUM_PARTITIONS * number for partition, end in committed(swarm, cluster).items() for number in range(end)}
    assert done <= whole_groups(swarm)


@pytest.mark.parametrize("number", kills(WORKER_CALLS))
def test_a_worker_killed_at_any_call_loses_nothing(make_swarm: MakeSwarm, cluster: MemoryCluster, number: int) -> None:
    swarm = make_swarm(rollout={"heartbeat_s": 60.0})
    swarm.publish_version(0)
    ask_all(swarm)
    cluster.faults.before = kill = Kill(number)
    first = swarm.start_worker(ScriptedEngine(), "w0")
    wait_until(lambda: not first.is_alive or whole_groups(swarm) == set(range(NUM_REQUESTS)), "the kill, or the end of the work")
    if first.is_alive:
        first.stop()
    assert isinstance(first.error, Killed) or kill.num_calls < number, first.error
    cluster.faults.before = None
    group = group_of(swarm, cluster)
    for member in list(group.members):
        # Its session ends.
        group.expel(member)
    assert_committed_is_done(swarm, cluster)
    second = swarm.start_worker(ScriptedEngine(), "w1")
    ends = dict.fromkeys(range(NUM_PARTITIONS), 2)
    wait_until(lambda: committed(swarm, cluster) == ends or not second.is_alive, "the next worker to have done the rest")
    assert second.error is None
    assert whole_groups(swarm) == set(range(NUM_REQUESTS))
    assert not dead_letters(swarm, cluster)


@pytest.mark.parametrize("number", kills(FEEDER_CALLS))
def test_a_feeder_killed_at_any_call_issues_every_seq_once(
    make_swarm: MakeSwarm, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("echo_rollout.feeder._MAX_BATCH", 3)
    swarm = make_swarm()
    swarm.publish_version(0)
    cluster.faults.before = kill = Kill(number)
    first = swarm.start_feeder()
    wait_until(lambda: not first.is_alive or len(swarm.requests()) == NUM_REQUESTS, "the kill, or all that the pace allows")
    if first.is_alive:
        first.stop()
    assert isinstance(first.error, Killed) or kill.num_calls < number, first.error
    cluster.faults.before = None
    second = swarm.start_feeder()
    wait_until(lambda: len(swarm.requests()) == NUM_REQUESTS or not second.is_alive, "the next feeder to have issued the rest")
    assert second.error is None
    assert sorted(record.seq for record in swarm.records(REQUESTS)) == list(range(NUM_REQUESTS))


class Poisoned(ScriptedEngine):
    """One prompt ends the engine, once those beside it have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        self.begun.append(prompt[0] - 1)
        if prompt[0] - 1 == POISON:
            raise EngineError("An illegal memory access was encountered.")
        return await super().generate(prompt, n, sampling)


def test_a_request_that_kills_three_workers_is_set_aside_whoever_they_are_and_its_neighbours_are_not(
    make_swarm: MakeSwarm, cluster: MemoryCluster
) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    ask_all(swarm)
    engines: list[Poisoned] = []
    for number in range(4):
        # Each on a machine of its own: no journal tells it anything.
        engines.append(Poisoned())
        worker = swarm.start_worker(engines[-1], f"w{number}")
        wait_until(lambda: not worker.is_alive or dead_letters(swarm, cluster), "a death, or the dead letter")  # noqa: B023
        if worker.is_alive:
            break
        assert isinstance(worker.error, EngineError), worker.error
    assert [POISON in engine.begun for engine in engines] == [True, True, True, False]
    assert engines[2].begun[-1] == POISON, "it ran alone the third time"
    wait_until(lambda: whole_groups(swarm) == set(range(NUM_REQUESTS)) - {POISON}, "everybody else's groups")
    (letter,) = dead_letters(swarm, cluster)
    assert letter["echo-reason"] == b"retries_exhausted"
    assert letter["__connect.errors.exception.message"] == b"3 times a worker died with this request in hand."


def test_a_worker_that_reaches_nobody_keeps_what_it_has_takes_no_more_says_so_and_delivers_in_the_end(
    make_swarm: MakeSwarm, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "echo_rollout")
    monkeypatch.setattr("echo_rollout.undelivered.STUCK_S", 0.1)
    monkeypatch.setattr("echo_rollout.worker._LOOK_S", 0.05)
    swarm = make_swarm()
    swarm.publish_version(0)
    engine = GatedEngine()
    swarm.start_worker(engine)
    engine.gate.set()
    topic = swarm.bus.namespace.topic(TRAJECTORIES)
    cluster.faults.hold(topic)
    swarm.ask(swarm.request(0), swarm.request(1))
    wait_until(lambda: "2 finished groups wait for Kafka" in caplog.text, "the worker to say so")
    assert swarm.metric("echo_rollout_groups_undelivered") == 2
    assert swarm.metric("echo_rollout_undelivered_seconds") > 0.1
    busy_before = swarm.bus.metrics.records_busy.labels(swarm.bus.namespace.topic(REQUESTS))._value.get()
    swarm.ask(*(swarm.request(seq) for seq in range(2, 20)))
    busy = swarm.bus.metrics.records_busy.labels(swarm.bus.namespace.topic(REQUESTS))._value
    wait_until(lambda: busy.get() > busy_before, "the worker to refuse more")
    assert swarm.metric("echo_rollout_groups_in_flight") <= 2
    assert not swarm.trajectories()
    cluster.faults.release(topic)
    wait_until(lambda: sorted(swarm.groups()) == sorted(f"{RUN}/{seq}" for seq in range(20)), "all groups")
    assert {len(members) for members in swarm.groups().values()} == {2}
    wait_until(lambda: not swarm.notices.current(), "the worker to say so no more")
    wait_until(lambda: swarm.metric("echo_rollout_groups_undelivered") == 0, "the worker to hear of the last delivery")
