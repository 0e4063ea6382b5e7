"""The main paths of feeder and worker over both clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_bus.bus import Bus
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import Purpose, WorkerState
from echo_schemas.topics import REQUESTS
from tests.unit.rollout.swarm import Swarm, wait_until


@pytest.fixture
def swarm(bus: Bus, tmp_path: Path) -> Iterator[Swarm]:
    """A run with probes."""
    made = Swarm(bus, tmp_path, rollout={"probe_size": 2})
    yield made
    made.close()


def test_groups_flow_from_feeder_to_log_and_versions_are_acknowledged(swarm: Swarm) -> None:
    swarm.start_feeder()
    worker = swarm.start_worker(ScriptedEngine())
    swarm.publish_version(0)
    wait_until(lambda: len([record for record in swarm.trajectories() if record.purpose is Purpose.TRAIN]) == 16, "what pace admits")
    swarm.say(groups_trained=4, version=1, next_seq=4)
    swarm.publish_version(1, next_seq=4)
    wait_until(lambda: any(status.installed_version == 1 for status in swarm.statuses()), "the acknowledgement of version 1")
    wait_until(lambda: len(swarm.groups()) == 14, "twelve groups and two probes")
    assert set(swarm.requests()) == set(range(12))
    worker.stop()
    assert worker.error is None
    assert swarm.statuses()[-1].state is WorkerState.GONE


def test_a_second_feeder_fences_the_first_and_goes_on_where_it_was(bus: Bus, tmp_path: Path) -> None:
    swarm = Swarm(bus, tmp_path, staleness={"budget": 1, "publication_period": 1, "admission": "free"})
    swarm.publish_version(0)
    first = swarm.start_feeder()
    wait_until(lambda: len(swarm.requests()) == 8, "a full window")
    second = swarm.start_feeder()
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: not first.is_alive, "the first feeder to end")
    assert swarm.is_fenced(first), first.error
    num_requests = len(swarm.requests())
    wait_until(lambda: len(swarm.requests()) > num_requests + 20, "the second feeder to go on")
    assert second.is_alive
    seqs = [request.seq for request in swarm.records(REQUESTS)]
    assert len(seqs) == len(set(seqs))
    swarm.close()
