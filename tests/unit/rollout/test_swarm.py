"""Feeder and workers together, with a scripted engine: order, versions, deliveries, drains."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions

from echo_bus.clock import Deadline
from echo_bus.dead_letters import said_of
from echo_bus.errors import DeliveryFailed, TooManyDeadLetters
from echo_memory import MemoryCluster
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.columns import pack_seqs, pack_tokens
from echo_schemas.records import FinishReason, Purpose, RolloutRequest, RunState, Sampling, Span, WorkerState
from echo_schemas.topics import REQUESTS, REQUESTS_DEAD, TRAJECTORIES, WORKERS
from echo_tasks.task import Observation, Turn
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, WAIT_S, GatedEngine, LetterTask, Swarm, wait_until

pytestmark = pytest.mark.slow


def test_a_run_yields_every_group_once_and_keeps_to_the_pace(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.start_feeder()
    swarm.start_worker(ScriptedEngine())
    swarm.publish_version(0)
    # (S + p + 1) · groups per step = 8 groups of 2.
    wait_until(lambda: len(swarm.trajectories()) == 16, "the groups that pace admits")
    assert sorted(swarm.requests()) == list(range(8))
    swarm.say(groups_trained=4, version=1, next_seq=4)
    swarm.publish_version(1, next_seq=4)
    wait_until(lambda: len(swarm.trajectories()) == 24, "the groups that the next version admits")
    groups = swarm.groups()
    assert sorted(groups) == sorted(f"{RUN}/{seq}" for seq in range(12))
    for members in groups.values():
        assert sorted(member.index for member in members) == [0, 1]
        assert len({member.attempt for member in members}) == 1


def test_no_request_before_version_0_is_published(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.say()
    swarm.start_feeder()
    swarm.say(version=0)
    assert not swarm.requests()
    swarm.publish_version(0)
    wait_until(swarm.requests, "the first request")


@pytest.mark.parametrize("parents_unit", [2, 64])
def test_a_fork_with_another_number_of_groups_a_step_is_paced_in_its_own(make_swarm: MakeSwarm, parents_unit: int) -> None:
    swarm = make_swarm(rollout={"depth": 8})
    first = 100 * parents_unit
    swarm.publish_version(100, next_seq=first)
    swarm.say(groups_trained=first, next_seq=first, closed=pack_seqs(first, [first + 1]), seen=b"")
    swarm.start_feeder()
    # (S + p + 1 - v) · groups per step = 8, and the parent had closed one of the seqs that come next.
    wait_until(lambda: len(swarm.requests()) == 8, "the groups that pace admits")
    swarm.say(version=101, published=101, groups_trained=first + 4, closed=pack_seqs(first, [first, *range(first + 1, first + 5)]))
    wait_until(lambda: len(swarm.requests()) == 12, "the groups that a step admits")
    assert sorted(swarm.requests()) == [first, *range(first + 2, first + 13)]


def test_a_worker_takes_nothing_before_its_turn_and_ends_without_it(make_swarm: MakeSwarm) -> None:
    """It was started with the other roles, and their learner has not accepted the run."""
    swarm, is_its_turn, looked = make_swarm(), threading.Event(), threading.Event()

    def may_join() -> bool:
        looked.set()
        return is_its_turn.wait(0.01)

    swarm.may_join = may_join
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    first = swarm.start_worker(ScriptedEngine())
    wait_until(looked.is_set, "the worker's look")
    wait_until(lambda: swarm.records(WORKERS)[-1].state is WorkerState.READY, "its weights")
    assert not swarm.trajectories()
    first.stop()
    swarm.start_worker(ScriptedEngine())
    is_its_turn.set()
    wait_until(lambda: len(swarm.trajectories()) == 2, "the group")


def test_a_request_waits_for_the_version_it_requires(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, required_version=2))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_groups_waiting") == 1, "the request to be held")
    assert not swarm.trajectories()
    swarm.publish_version(2)
    wait_until(lambda: len(swarm.trajectories()) == 2, "the group")
    assert {record.min_version for record in swarm.trajectories()} == {2}


def test_an_exact_request_is_generated_under_its_version_or_not_at_all(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(3)
    swarm.ask(
        swarm.request(2, purpose=Purpose.PROBE, required_version=2, exact=True),
        swarm.request(3, purpose=Purpose.PROBE, required_version=3, exact=True),
    )
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_groups_total", outcome="superseded") == 1, "the old probe to be closed")
    wait_until(lambda: len(swarm.trajectories()) == 2, "the probe of the installed version")
    assert {record.max_version for record in swarm.trajectories()} == {3}


def test_a_request_past_its_deadline_is_closed_and_counted(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, deadline_ms=_now_ms() - 1), swarm.request(1, required_version=9, deadline_ms=1))
    swarm.ask(swarm.request(2))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_groups_total", outcome="expired") == 2, "both to expire")
    wait_until(lambda: set(swarm.groups()) == {f"{RUN}/2"}, "the one that is in time")


def test_a_request_whose_seq_is_decided_already_is_not_worked_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0, next_seq=2)
    swarm.ask(swarm.request(1), swarm.request(2), swarm.request(0, purpose=Purpose.PROBE, exact=True))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_groups_total", outcome="superseded") == 1, "the decided one to be closed")
    wait_until(lambda: len(swarm.groups()) == 2, "the others")
    assert {(record.purpose, record.seq) for record in swarm.trajectories()} == {(Purpose.TRAIN, 2), (Purpose.PROBE, 0)}


def test_a_request_that_no_engine_can_serve_is_a_dead_letter(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, prompt_token_ids=pack_tokens([999])), swarm.request(1))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: set(swarm.groups()) == {f"{RUN}/1"}, "the request behind the bad one")


def test_no_more_groups_are_in_hand_than_allowed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 2})
    swarm.publish_version(0)
    for seq in range(8):
        swarm.ask(swarm.request(seq), partition=seq % 4)
    engine = GatedEngine()
    swarm.start_worker(engine)
    busy = swarm.bus.metrics.records_busy.labels(swarm.bus.namespace.topic(REQUESTS))
    wait_until(lambda: busy._value.get() > 0, "requests that are put off")
    assert swarm.metric("echo_rollout_groups_in_flight") <= 4
    wait_until(lambda: engine.num_running == 3, "two groups in the engine's batch, and one that waits inside it")
    engine.gate.set()
    wait_until(lambda: len(swarm.groups()) == 8, "all groups")
    assert engine.most_running == 3


def test_an_exact_request_passes_those_that_wait_for_room_and_one_that_grew_too_old_is_closed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 4})
    swarm.publish_version(0)
    engine = GatedEngine()
    swarm.start_worker(engine)
    swarm.ask(*(swarm.request(seq) for seq in range(5)))
    wait_until(lambda: engine.num_running == 5, "a full engine")
    asked_ms = _now_ms()
    deadline_ms = asked_ms + 300
    swarm.ask(swarm.request(5, deadline_ms=deadline_ms), swarm.request(6))
    swarm.ask(swarm.request(0, purpose=Purpose.PROBE, exact=True))
    wait_until(lambda: engine.num_running == 6, "the exact one beside them")
    # The worker takes the asker's clock to be late by as long as the requests were under way.
    passed_ms = deadline_ms + _now_ms() - asked_ms
    wait_until(lambda: _now_ms() > passed_ms, "the deadline of the one that waits")
    engine.gate.set()
    wait_until(lambda: len(swarm.groups()) == 7, "six of seven, and the probe")
    assert swarm.metric("echo_rollout_groups_total", outcome="expired") == 1


def test_a_worker_that_is_told_to_stop_hands_back_what_it_cannot_finish(make_swarm: MakeSwarm) -> None:
    # If it waited for a group that nothing can finish, it would not end in time.
    swarm = make_swarm(run={"name": RUN, "drain_s": 1_500.0})
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, required_version=1), swarm.request(1))
    first = swarm.start_worker(ScriptedEngine())
    wait_until(lambda: set(swarm.groups()) == {f"{RUN}/1"}, "the request that needs no newer weights")
    first.stop()
    assert first.error is None
    assert swarm.statuses()[-1].state is WorkerState.GONE
    swarm.publish_version(1)
    swarm.start_worker(ScriptedEngine(), "w1")
    wait_until(lambda: f"{RUN}/0" in swarm.groups(), "the request that was handed back")


def test_a_snapshot_that_is_refused_or_corrupt_keeps_the_old_weights(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine(reject=frozenset({1})))
    wait_until(
        lambda: swarm.metric("echo_rollout_installed_version") == 0 and swarm.metric("echo_rollout_installs_total", outcome="installed"),
        "version 0",
    )
    swarm.publish_version(1)
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="rejected") == 1, "version 1 to be refused")
    swarm.publish_version(2, promise="0" * 64)
    wait_until(lambda: swarm.metric("echo_rollout_installs_total", outcome="corrupt") >= 2, "version 2 to be tried again")
    swarm.ask(swarm.request(0))
    wait_until(lambda: len(swarm.trajectories()) == 2, "a group under the old weights")
    assert {record.max_version for record in swarm.trajectories()} == {0}
    swarm.publish_version(3)
    wait_until(lambda: any(status.installed_version == 3 for status in swarm.statuses()), "version 3 to be acknowledged")


def test_a_second_feeder_stops_the_first_and_repeats_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(staleness={"budget": 1, "publication_period": 1, "admission": "free"})
    swarm.publish_version(0)
    first = swarm.start_feeder()
    wait_until(lambda: len(swarm.requests()) == 8, "a full window")
    swarm.start_feeder()
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: not first.is_alive, "the first feeder to end")
    assert swarm.is_fenced(first), first.error
    wait_until(lambda: len(swarm.requests()) > 20, "the second feeder to go on")
    seqs = [record.seq for record in swarm.records(REQUESTS)]
    assert len(seqs) == len(set(seqs))


def test_partitions_that_are_added_get_requests_while_the_feeder_goes_on(make_swarm: MakeSwarm) -> None:
    """An operator adds them for more workers, some of which read no others."""
    swarm = make_swarm(staleness={"budget": 1, "publication_period": 1, "admission": "free"})
    swarm.publish_version(0)
    swarm.start_feeder()
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: len(swarm.requests()) > 8, "requests")
    observer = swarm.bus.observer()
    before = observer.num_partitions()
    admin = swarm.bus.cluster.admin()
    (grown,) = admin.create_partitions([NewPartitions(swarm.bus.namespace.topic(REQUESTS), before + 2)]).values()
    grown.result(WAIT_S)
    wait_until(lambda: observer.committed(before + 2).keys() >= {before, before + 1}, "work that is done in each of the new ones")
    observer.close()
    seqs = [record.seq for record in swarm.records(REQUESTS)]
    assert len(seqs) == len(set(seqs))


def test_a_feeder_writes_again_what_the_log_does_not_show(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.ask(swarm.request(0), swarm.request(3), swarm.request(5))
    swarm.publish_version(0, next_seq=2)
    swarm.say(groups_trained=2, next_seq=2)
    swarm.start_worker(ScriptedEngine())
    swarm.start_feeder()
    wait_until(lambda: {2, 4, 6, 7} <= set(swarm.requests()), "the missing seqs and those that follow")
    assert 1 not in swarm.requests()
    assert swarm.requests()[4].group_id == f"{RUN}/4"


def test_a_paused_run_gets_no_requests_and_a_stopped_one_ends_its_feeder(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.order(RunState.PAUSED)
    feeder = swarm.start_feeder()
    swarm.publish_version(0)
    swarm.say(groups_ready=1)
    assert not swarm.requests()
    swarm.order(RunState.RUNNING)
    wait_until(swarm.requests, "requests after the pause")
    swarm.order(RunState.STOPPING)
    wait_until(lambda: not feeder.is_alive, "the feeder to end")
    assert feeder.error is None


def test_one_probe_is_issued_per_published_version(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"probe_size": 3})
    swarm.publish_version(0)
    swarm.start_feeder()
    swarm.start_worker(ScriptedEngine())
    for version in (1, 2):
        wait_until(lambda: len(swarm.requests(Purpose.PROBE)) == version, "the probe of the version before")  # noqa: B023
        swarm.publish_version(version)
    wait_until(lambda: sorted(swarm.requests(Purpose.PROBE)) == [0, 1, 2], "three probes")
    assert all(probe.exact and probe.required_version == seq for seq, probe in swarm.requests(Purpose.PROBE).items())


def test_a_request_that_was_committed_and_left_no_record_is_issued_again_and_no_other(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"request_timeout_s": 0.1, "depth": 8})
    swarm.publish_version(0)
    swarm.say(closed=b"", seen=b"", clock_s=0.0, read_s=0.0)
    swarm.start_feeder()
    wait_until(lambda: len(swarm.requests()) == 8, "the groups that pace admits")
    worker = swarm.start_worker(ScriptedEngine())
    wait_until(lambda: len(swarm.groups()) == 8, "all groups")
    # The learner is far away and slow: it has seen one, decided another, and of a third it has read past the place where it would stand.
    beat = itertools.count(100, 20)

    def again() -> set[int]:
        now_s = float(next(beat))
        swarm.say(seen=pack_seqs(0, {*range(20)} - {5}), closed=pack_seqs(0, [1]), clock_s=now_s, read_s=now_s)
        return {record.seq for record in swarm.records(REQUESTS) if record.resends}

    wait_until(again, "the lost one to be issued again")
    assert again() == {5}
    worker.stop()


def test_a_worker_that_was_killed_leaves_its_requests_to_the_next(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    cluster.faults.fail_next_produce(swarm.bus.namespace.topic(TRAJECTORIES))
    first = swarm.start_worker(ScriptedEngine())
    wait_until(lambda: not first.is_alive, "the worker to end by the lost trajectory")
    assert isinstance(first.error, DeliveryFailed)
    swarm.start_worker(ScriptedEngine(), "w1")
    wait_until(
        lambda: len([group for group in swarm.groups().get(f"{RUN}/0", []) if group.worker_id == "w1"]) == 2, "the group, again and whole"
    )


def test_what_an_empty_generation_leads_to(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    swarm.start_worker(ScriptedEngine(answer=lambda prompt, version, index: []))
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="empty") == 1, "the group to be given up")
    assert swarm.metric("echo_rollout_empty_generations_total") == 2
    assert not swarm.trajectories()
    wait_until(lambda: "Worker w0 can make no group of it: empty: " in refusals(swarm).get(0, ""), "its request among the dead letters")


class Guessing:
    """An episode of two turns: the first is answered with `AB`, the second ends it."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self) -> Observation:
        return Observation(text="")

    def step(self, action: str) -> Turn:
        self.turns += 1
        return Turn(observation="AB", reward=float(self.turns), done=self.turns == 2)


class GuessingTask(LetterTask):
    """Letters with turns."""

    def environment(self, entry: Any) -> Guessing:
        return Guessing()


class BrokenTask(LetterTask):
    """Its environment cannot be made."""

    def environment(self, entry: Any) -> Guessing:
        raise RuntimeError("no such episode")


def test_every_sample_of_a_task_with_turns_is_an_episode_of_its_own(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, sampling=Sampling(max_new_tokens=8)))
    swarm.start_worker(ScriptedEngine(), task=GuessingTask())
    wait_until(lambda: len(swarm.trajectories()) == 2, "two episodes")
    for record in swarm.trajectories():
        assert record.finish_reason is FinishReason.ENVIRONMENT
        assert record.turn_rewards == (1.0, 2.0)
        assert record.generated == (Span(start=3, end=6), Span(start=8, end=11))
        assert [(span.start, span.end) for span in record.version_spans] == [(3, 6), (8, 11)]
        assert record.tokens[6:8].tolist() == [1, 2]


def test_a_task_that_fails_costs_its_group_and_not_the_worker(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    worker = swarm.start_worker(ScriptedEngine(), task=BrokenTask())
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="environment") == 1, "the group to be given up")
    wait_until(lambda: "environment: " in refusals(swarm).get(0, ""), "its request among the dead letters")
    assert worker.is_alive


def test_a_worker_at_which_everything_fails_ends_with_the_reason(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_rollout.refusing._MOST_FAILED", 3)
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(*(swarm.request(seq) for seq in range(6)))
    worker = swarm.start_worker(ScriptedEngine(), task=BrokenTask())
    wait_until(lambda: not worker.is_alive, "the worker to end")
    assert isinstance(worker.error, TooManyDeadLetters)
    assert "no such episode" in str(worker.error)


class UnsteadyTask(LetterTask):
    """Its first `num_broken` environments cannot be made."""

    def __init__(self, num_broken: int) -> None:
        self.left = num_broken

    def environment(self, entry: Any) -> Guessing:
        if self.left:
            self.left -= 1
            raise RuntimeError("no such episode")
        return Guessing()


def test_a_worker_says_why_half_of_its_groups_fail_until_they_do_no_more(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(*(swarm.request(seq) for seq in range(7)))
    task = UnsteadyTask(8)
    swarm.start_worker(ScriptedEngine(), task=task)
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="environment") == 7, "seven to fail")
    assert "failing" not in swarm.notices.current()
    swarm.ask(swarm.request(7))
    said = wait_until(lambda: swarm.notices.current().get("failing"), "the worker to say so")
    assert "8 of the last 8 groups were given up, the last one because: " in said
    assert "no such episode" in said
    swarm.ask(*(swarm.request(seq) for seq in range(8, 17)))
    wait_until(lambda: "failing" not in swarm.notices.current(), "the worker to say so no more")


def test_a_request_that_expires_for_the_last_time_is_a_dead_letter_and_before_that_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"resends": 1})
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, deadline_ms=1), swarm.request(1, deadline_ms=1, resends=1))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_groups_total", outcome="expired") == 2, "both to expire")
    wait_until(lambda: refusals(swarm), "the second among the dead letters")
    assert set(refusals(swarm)) == {1}
    assert "Issued 2 times, the last one to worker w0: expired: It came after its deadline." in refusals(swarm)[1]


class Starting:
    """Episodes that begin in turn: the second fails at once."""

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self) -> Observation:
        if self.number:
            raise RuntimeError("the sandbox did not start")
        return Observation(text="")

    def step(self, action: str) -> Turn:
        return Turn(observation="", reward=1.0, done=True)


class StartingTask(LetterTask):
    """Numbers its episodes."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def environment(self, entry: Any) -> Starting:
        return Starting(next(self.numbers))


def test_one_episode_that_fails_takes_the_others_of_its_group_off_the_engine(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    engine = GatedEngine()
    worker = swarm.start_worker(engine, task=StartingTask())
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="environment") == 1, "the group to be given up")
    wait_until(lambda: engine.num_running == 0, "the other episode to leave the engine")
    assert worker.is_alive


def test_an_oversized_trajectory_is_counted_and_nothing_of_its_group_is_written(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, entry='{"much": "' + "x" * 600_000 + '"}', prompt_token_ids=pack_tokens([1])))
    long = ScriptedEngine()
    long._generation = _wordy(long._generation)  # type: ignore[method-assign]
    swarm.start_worker(long)
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="oversized") == 1, "the group to be given up")
    assert not swarm.trajectories()
    wait_until(lambda: "oversized: " in refusals(swarm).get(0, ""), "its request among the dead letters")


def refusals(swarm: Swarm) -> dict[int, str]:
    """By seq, why a request is among the dead letters."""
    with closing(swarm.bus.reader([REQUESTS_DEAD])) as reader:
        reader.start()
        return {
            message.record.seq: said_of(message.headers)
            for batch in reader.read_to_end(Deadline.after(10))
            for message in batch
            if isinstance(message.record, RolloutRequest)
        }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _wordy(made: Any) -> Any:
    return lambda *arguments: dataclasses.replace(made(*arguments), text="x" * 400_000)


def test_a_feeder_says_why_nothing_is_issued_or_taken(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_runtime.notices.STANDSTILL_S", 0.05)
    swarm = make_swarm()

    def said() -> str:
        return swarm.notices.current().get("requests", "")

    swarm.start_feeder()
    wait_until(lambda: "No version is published yet." in said(), "word that nothing is published")
    swarm.publish_version(0)
    wait_until(lambda: "No worker was ready" in said(), "word that nobody works")
    assert f"{len(swarm.requests())} requests wait for one." in said()
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: not said(), "no word while somebody works")
    swarm.order(RunState.PAUSED)
    wait_until(lambda: "paused by an order" in said(), "word that the run is paused")
