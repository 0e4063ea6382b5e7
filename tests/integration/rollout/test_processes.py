"""Workers and feeders as processes: killed, ended by SIGTERM, replaced. What the log shows afterwards is what a learner would train."""

from __future__ import annotations

import pytest

from echo_bus.clock import Deadline
from echo_core.assembly import GroupAssembler
from echo_core.groups import AssemblyLimits
from echo_schemas.records import Coordinates, Reward, RewardOutcome, RewardTerm, Trajectory, WorkerState
from echo_schemas.topics import REQUESTS, TRAJECTORIES
from tests.integration.rollout.conftest import NUM_PARTITIONS, Fleet, await_in
from tests.unit.rollout.swarm import RUN, WAIT_S

pytestmark = pytest.mark.kafka


def assembled(fleet: Fleet) -> GroupAssembler:
    """What a learner makes of the log, with a reward for each trajectory."""
    terms = (RewardTerm(name="exact", weight=1.0, required=True),)
    assembler = GroupAssembler(RUN, terms, AssemblyLimits(max_open_groups=1_000))
    reader = fleet.bus.reader([TRAJECTORIES])
    try:
        reader.start()
        for number, message in enumerate(message for batch in reader.read_to_end(Deadline.after(WAIT_S)) for message in batch):
            assert isinstance(message.record, Trajectory)
            assembler.add_trajectory(message.coordinates, message.record)
            assembler.add_reward(Coordinates(partition=message.partition, offset=number), scored(message.record, message.coordinates))
    finally:
        reader.close()
    return assembler


def scored(record: Trajectory, where: Coordinates) -> Reward:
    return Reward(
        run_id=RUN,
        group_id=record.group_id,
        seq=record.seq,
        attempt=record.attempt,
        index=record.index,
        of=where,
        name="exact",
        code_version="1",
        outcome=RewardOutcome.SCORED,
        value=1.0,
        seconds=0.0,
        time_ms=0,
    )


@pytest.mark.slow
def test_what_a_killed_worker_had_in_hand_is_done_by_the_other_and_each_group_has_one_attempt(fleet: Fleet) -> None:
    held = fleet.folder / "held"
    held.touch()
    fleet.launch("worker", "w0", held=str(held))
    fleet.launch("worker", "w1")
    owners = await_in(fleet, lambda: _shared(fleet), "the workers to share the partitions")
    (mine,) = (partitions for client, partitions in owners.items() if client.endswith("w0"))
    for seq in range(16):
        fleet.ask(fleet.request(seq), partition=seq % NUM_PARTITIONS)
    num_others = sum(seq % NUM_PARTITIONS not in mine for seq in range(16))
    await_in(fleet, lambda: len(fleet.groups()) == num_others, "the second worker to have done its part")
    await_in(fleet, lambda: len([line for line in fleet.journal("w0") if line[0] == "+"]) == 16 - num_others, "the first to have its own")
    # Some are published before it dies, and none of those committed for certain: both are what really happens.
    held.unlink()
    await_in(fleet, lambda: any(record.worker_id == "w0" for record in fleet.trajectories()), "the first worker to publish something")
    fleet.kill("w0")
    await_in(fleet, lambda: fleet.committed() == [4] * NUM_PARTITIONS, "the other worker to have done everything")
    assembler = assembled(fleet)
    ready = assembler.ready
    assert [group.seq for group in ready] == list(range(16))
    for group in ready:
        assert len({member.trajectory.attempt for member in group.members}) == 1
        assert sorted(member.trajectory.index for member in group.members) == [0, 1]


def _shared(fleet: Fleet) -> dict[str, set[int]] | None:
    owners = fleet.owners()
    return owners if [len(partitions) for partitions in owners.values()] == [2, 2] else None


@pytest.mark.slow
def test_a_worker_ended_by_sigterm_has_published_and_committed_what_its_engine_finished(fleet: Fleet) -> None:
    held = fleet.folder / "held"
    held.touch()
    # How long a busy machine takes to deliver is not what is tested.
    fleet.launch("worker", "w0", drain_s=WAIT_S, held=str(held))
    await_in(fleet, lambda: fleet.statuses() and fleet.statuses()[-1].installed_version == 0, "the weights")
    await_in(fleet, lambda: len(fleet.statuses()[-1].partitions) == NUM_PARTITIONS, "the partitions")
    fleet.ask(*(fleet.request(seq) for seq in range(4)))
    await_in(fleet, lambda: len([line for line in fleet.journal("w0") if line[0] == "+"]) == 4, "four groups in hand")
    assert not fleet.trajectories()
    fleet.tell_to_end("w0")
    held.unlink()
    fleet.await_end("w0")
    assert len(fleet.trajectories()) == 8
    assert fleet.committed()[0] == 4
    assert fleet.statuses()[-1].state is WorkerState.GONE
    fleet.launch("worker", "w1")
    fleet.ask(fleet.request(4))
    await_in(fleet, lambda: f"{RUN}/4" in fleet.groups(), "the next worker's group")
    assert {len(members) for members in fleet.groups().values()} == {2}, "a group was done twice"


@pytest.mark.slow
def test_a_feeder_that_was_killed_is_followed_by_one_that_issues_every_seq_once(fleet: Fleet) -> None:
    fleet.launch("worker", "w0")
    for number in range(3):
        before = len(fleet.records(REQUESTS))
        fleet.launch("feeder", f"f{number}", admission="free")
        await_in(fleet, lambda: len(fleet.records(REQUESTS)) > before + 30, "thirty more requests")  # noqa: B023
        fleet.kill(f"f{number}")
    # What the last one had sent when it was killed may reach the log after its death.
    await_in(fleet, lambda: len(fleet.groups()) == len(fleet.records(REQUESTS)), "all groups")
    seqs = sorted(record.seq for record in fleet.records(REQUESTS))
    assert seqs == list(range(len(seqs)))
    assert [group.seq for group in assembled(fleet).ready] == seqs
