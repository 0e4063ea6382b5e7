"""Requests between feeder and workers: shared, finished before a stop, issued on after a restart, refused where none can serve them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from echo_memory import MemoryCluster
from echo_memory.groups import Group
from echo_rollout.engines.engine import Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Sampling, WorkerState
from echo_schemas.topics import REQUESTS
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, WAIT_S, GatedEngine, Swarm, wait_until

pytestmark = pytest.mark.slow


def group_of(swarm: Swarm, cluster: MemoryCluster) -> Group:
    """The workers' consumer group."""
    return cluster._broker.group(swarm.bus.namespace.group("worker"))


def committed(swarm: Swarm, cluster: MemoryCluster) -> dict[int, int]:
    """Offsets by partition of `requests`."""
    return {partition: offset for (_, partition), (offset, _) in group_of(swarm, cluster).committed.items()}


def num_noted(group: Group) -> int:
    """How many requests the notes beside the offsets name as in hand."""
    return sum(len(json.loads(note)["in_hand"]) for _, note in group.committed.values() if note)


def dead_letters(swarm: Swarm, cluster: MemoryCluster) -> list[dict[str, bytes]]:
    """The headers of what was refused for good."""
    topic = cluster._broker.topics[f"{swarm.bus.namespace.topic(REQUESTS)}.dlq"]
    return [dict(record.headers or ()) for log in topic.partitions for record in log.read(0, committed=True)]


def test_two_workers_share_the_requests_and_do_each_once(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    for worker_id in ("w0", "w1"):
        swarm.start_worker(ScriptedEngine(), worker_id)
    group = group_of(swarm, cluster)
    wait_until(lambda: [len(member.owned) for member in group.members] == [2, 2], "each worker to have half of the partitions")
    for seq in range(12):
        swarm.ask(swarm.request(seq), partition=seq % 4)
    wait_until(lambda: len(swarm.trajectories()) == 24, "all groups")
    assert sorted(swarm.groups()) == sorted(f"{RUN}/{seq}" for seq in range(12))
    assert {len({record.attempt for record in members}) for members in swarm.groups().values()} == {1}
    shares = {worker: sum(record.worker_id == worker for record in swarm.trajectories()) for worker in ("w0", "w1")}
    assert shares == {"w0": 12, "w1": 12}


def test_garbage_among_the_requests_ends_neither_feeder_nor_worker_at_any_start(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    for number in range(120):
        swarm.publisher.publish_bytes(swarm.bus.namespace.topic(REQUESTS), b"garbage", key=b"k", partition=number % 4)
    swarm.publisher.flush(WAIT_S)
    for seq in (0, 4):
        roles = [swarm.start_feeder(), swarm.start_worker(ScriptedEngine())]
        wait_until(lambda seq=seq: len(swarm.groups()) >= seq + 1, "work behind the garbage")  # type: ignore[misc]
        assert [role.error for role in roles] == [None, None]
        for role in roles:
            role.stop()
    assert len(dead_letters(swarm, cluster)) == 120


def test_a_worker_that_joins_takes_part_of_the_work_of_one_that_is_slow(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 1})
    swarm.publish_version(0)
    stuck = GatedEngine()
    swarm.start_worker(stuck, "w0")
    for seq in range(8):
        swarm.ask(swarm.request(seq), partition=seq % 4)
    wait_until(lambda: stuck.num_running, "the first worker to be at work")
    swarm.start_worker(ScriptedEngine(), "w1")
    wait_until(lambda: any(record.worker_id == "w1" for record in swarm.trajectories()), "the second worker's first group")
    stuck.gate.set()
    wait_until(lambda: len(swarm.groups()) == 8, "all groups")


class NotingEngine(GatedEngine):
    """Notes the prompts that it begins."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.begun: set[tuple[int, ...]] = set()

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        self.begun.add(tuple(prompt))
        return await super().generate(prompt, n, sampling)


def test_only_the_new_owner_of_a_partition_does_its_requests_that_had_not_begun(make_swarm: MakeSwarm, cluster: MemoryCluster) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 4})
    swarm.publish_version(0)
    first, second = NotingEngine(), NotingEngine()
    second.gate.set()
    swarm.start_worker(first, "w0")
    group = group_of(swarm, cluster)
    wait_until(lambda: [len(member.owned) for member in group.members] == [4], "the first worker to have all partitions")
    for seqs in (range(5), range(5, 8)):
        for seq in seqs:
            swarm.ask(swarm.request(seq, prompt_token_ids=pack_tokens([1, 2, 3 + seq])), partition=seq % 4)
        wait_until(lambda: first.num_running == 5, "five groups in the first engine")
    wait_until(lambda: num_noted(group) == 8, "three more to wait for room; every two partitions have one of them")
    begun = set(first.begun)
    swarm.start_worker(second, "w1")
    wait_until(lambda: [len(member.owned) for member in group.members] == [2, 2], "each worker to have half of the partitions")
    wait_until(lambda: len(second.begun) == 4, "the second worker to do what lies in its partitions")
    first.gate.set()
    wait_until(lambda: len(first.begun | second.begun) == 8 and not first.num_running, "all groups")
    swarm.ask(swarm.request(8))
    wait_until(lambda: len(swarm.groups()) == 9, "a group that was asked for later")
    assert second.begun - begun, "some had not begun"
    assert first.begun & second.begun <= begun, "the first worker began nothing whose partition had gone"


def test_a_worker_that_is_told_to_stop_publishes_and_commits_the_groups_that_the_engine_finishes(
    make_swarm: MakeSwarm, cluster: MemoryCluster
) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    engine = GatedEngine()
    for seq in range(3):
        swarm.ask(swarm.request(seq), partition=seq)
    swarm.ask(swarm.request(3, required_version=9), partition=3)
    worker = swarm.start_worker(engine)
    wait_until(lambda: engine.num_running == 3, "three groups in the engine")
    worker.signal.set()
    wait_until(lambda: swarm.statuses()[-1].state is WorkerState.DRAINING, "the worker to say that it drains")
    swarm.ask(swarm.request(4))
    engine.gate.set()
    worker.stop()
    assert worker.error is None
    assert sorted(swarm.groups()) == [f"{RUN}/{seq}" for seq in range(3)]
    assert all(len(members) == 2 for members in swarm.groups().values())
    assert [committed(swarm, cluster).get(partition, 0) for partition in range(4)] == [1, 1, 1, 0]
    assert swarm.metric("echo_rollout_groups_total", outcome="abandoned") == 1


def test_a_feeder_that_is_started_again_goes_on_at_its_seq_without_gap_or_double(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"depth": 64})
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    for version, decided in enumerate(range(4, 16, 4), start=1):
        feeder = swarm.start_feeder()
        # (S + p + 1) · groups per step, with S = 1 and 4 groups per step.
        wait_until(lambda: len(swarm.records(REQUESTS)) == 4 * (version + 1), "what pace admits")  # noqa: B023
        feeder.stop()
        assert feeder.error is None
        swarm.say(groups_trained=decided, version=version, next_seq=decided)
        swarm.publish_version(version, next_seq=decided)
    assert sorted(record.seq for record in swarm.records(REQUESTS)) == list(range(16))
    assert [record.resends for record in swarm.records(REQUESTS)] == [0] * 16


def test_one_empty_answer_is_asked_for_again_and_the_group_is_whole(make_swarm: MakeSwarm) -> None:
    calls = itertools.count()

    def answer(prompt: Sequence[int], version: int, index: int) -> Sequence[int]:
        return [] if next(calls) == 0 else [3, 4]

    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    swarm.start_worker(ScriptedEngine(answer=answer))
    wait_until(lambda: len(swarm.trajectories()) == 2, "the group")
    assert swarm.metric("echo_rollout_empty_generations_total") == 1
    assert {tuple(record.tokens[3:].tolist()) for record in swarm.trajectories()} == {(3, 4)}


@pytest.mark.parametrize("token", [-1, 32, 151_935])
def test_a_token_that_the_model_does_not_have_ends_its_group_and_nothing_else(make_swarm: MakeSwarm, token: int) -> None:
    def answer(prompt: Sequence[int], version: int, index: int) -> Sequence[int]:
        return [3, token, 4] if prompt[0] == 7 and index else [3, 4]

    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, prompt_token_ids=pack_tokens([7, 7])), swarm.request(1))
    worker = swarm.start_worker(ScriptedEngine(answer=answer))
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="invalid") == 1, "the group to be given up")
    wait_until(lambda: len(swarm.trajectories()) == 2, "the other group")
    assert set(swarm.groups()) == {f"{RUN}/1"}
    assert worker.is_alive


class UncertainEngine(ScriptedEngine):
    """Cannot say how likely the last of the group's tokens was; `wordy`: says it with many words instead."""

    def __init__(self, *, wordy: bool = False) -> None:
        super().__init__()
        self._wordy = wordy

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        *others, last = await super().generate(prompt, n, sampling)
        if prompt[0] != 7:
            return [*others, last]
        if self._wordy:
            return [*others, dataclasses.replace(last, text="x" * 1_000_000)]
        return [*others, dataclasses.replace(last, logprobs=np.full(len(last.token_ids), np.nan, np.float32))]


@pytest.mark.parametrize(("wordy", "reason"), [(False, "invalid"), (True, "oversized")])
def test_one_member_that_cannot_be_written_keeps_the_whole_group_out_of_the_log(make_swarm: MakeSwarm, wordy: bool, reason: str) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, prompt_token_ids=pack_tokens([7, 7])), swarm.request(1))
    swarm.start_worker(UncertainEngine(wordy=wordy))
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason=reason) == 1, "the group to be given up")
    wait_until(lambda: set(swarm.groups()) == {f"{RUN}/1"}, "the other group alone")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_token_ids": pack_tokens([1] * 65)}, "above the engine's 64"),
        ({"prompt_token_ids": pack_tokens([1] * 61), "sampling": Sampling(max_new_tokens=4)}, "A prompt of 61 tokens and 4 new ones"),
        ({"prompt_token_ids": pack_tokens([1, -2])}, "outside the vocabulary of 32"),
        ({"entry": "{"}, "The entry is not JSON"),
        ({"entry": "[1]"}, "The entry is list, not an object"),
    ],
)
def test_a_request_that_cannot_be_served_is_set_aside_with_its_reason(
    make_swarm: MakeSwarm, cluster: MemoryCluster, changes: dict[str, Any], said: str
) -> None:
    swarm = make_swarm(policy={"base": "demo:tiny-qwen3", "max_length": 64})
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, **changes), swarm.request(1, prompt_token_ids=pack_tokens([1] * 60), sampling=Sampling(max_new_tokens=4)))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: set(swarm.groups()) == {f"{RUN}/1"}, "the request behind it, which just fits")
    (headers,) = wait_until(lambda: dead_letters(swarm, cluster), "the dead letter")
    assert any(said in value.decode() for value in headers.values()), headers
    wait_until(lambda: committed(swarm, cluster).get(0) == 2, "both to be committed")
