"""Feeder and workers of different speeds as processes on a real Kafka: a slow one dies with work in hand, a third one joins late."""

from __future__ import annotations

from collections import Counter

import pytest

from echo_schemas.records import WorkerState
from echo_schemas.topics import REQUESTS
from tests.integration.rollout.conftest import Fleet, await_in
from tests.integration.rollout.test_processes import assembled
from tests.unit.rollout.swarm import RUN

pytestmark = pytest.mark.kafka


def delivered(fleet: Fleet) -> Counter[str]:
    """Groups by the worker that delivered them."""
    return Counter(members[0].worker_id for members in fleet.groups().values())


def in_hand(fleet: Fleet, worker: str) -> int:
    """Requests that a worker noted and did not end."""
    lines = fleet.journal(worker)
    return sum(line[0] == "+" for line in lines) - sum(line[0] == "-" for line in lines)


@pytest.mark.slow
def test_unequal_workers_share_a_run_one_dies_with_work_in_hand_and_a_third_joins_late(fleet: Fleet) -> None:
    fleet.launch("worker", "fast", seconds=0.5)
    fleet.launch("worker", "slow", seconds=2.5)
    await_in(fleet, lambda: len(fleet.owners()) == 2 and all(fleet.owners().values()), "both workers to have partitions")
    fleet.launch("feeder", "feeder", admission="free")
    await_in(fleet, lambda: delivered(fleet)["slow"] >= 4 and delivered(fleet)["fast"] >= 12, "both workers to deliver")
    counts = delivered(fleet)
    assert counts["slow"] < counts["fast"] / 2, counts
    statuses = {status.worker_id: status for status in fleet.statuses() if status.state is WorkerState.READY}
    assert set(statuses["fast"].partitions) | set(statuses["slow"].partitions) == {0, 1, 2, 3}
    assert not set(statuses["fast"].partitions) & set(statuses["slow"].partitions)
    assert statuses["fast"].rollouts_per_s > 2 * statuses["slow"].rollouts_per_s > 0

    await_in(fleet, lambda: in_hand(fleet, "slow") > 0, "the slow worker to have work in hand")
    fleet.kill("slow")
    asked = {record.seq for record in fleet.records(REQUESTS)}
    fleet.launch("worker", "late", seconds=1.0)
    await_in(fleet, lambda: delivered(fleet)["late"] >= 3, "the third worker to deliver")
    await_in(fleet, lambda: {f"{RUN}/{seq}" for seq in asked} <= set(fleet.groups()), "what the dead worker had in hand")
    fleet.tell_to_end("feeder")
    fleet.await_end("feeder")
    seqs = [group.seq for group in assembled(fleet).ready]
    assert len(seqs) == len(set(seqs)), "a group was assembled twice"
    assert asked <= set(seqs)
