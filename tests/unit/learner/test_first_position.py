"""Where a run that never began starts to read: not at the beginning of a namespace that other runs have filled."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import ManualClock
from echo_core.groups import AssemblyState
from echo_learner.start.resuming import since_it_began
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.records import Coordinates
from echo_schemas.topics import REWARDS, TRAJECTORIES
from tests.unit.core.records import reward
from tests.unit.learner.pipeline import sample

NOTHING = AssemblyState(
    floor=0, closed=frozenset(), trajectory_lows={}, trajectory_read_to={}, reward_lows={}, settled=frozenset()
)  # fmt: skip


def test_what_lay_there_before_the_run_is_not_read() -> None:
    clock = ManualClock()
    cluster = MemoryCluster(clock=clock)
    bus = Bus(cluster=cluster, namespace=Namespace("test"), clock=clock, role="learner", run_id="b")
    for created in cluster.admin().create_topics([NewTopic("test.trajectories", 2, 1), NewTopic("test.rewards", 2, 1)]).values():
        created.result(5)
    publisher = bus.publisher(profiles.PRODUCER_LATENCY)
    for _ in range(3):
        publisher.publish(TRAJECTORIES, sample(0, 0), partition=0).wait(5)
    clock.advance(5 * 3600)
    publisher.publish(TRAJECTORIES, sample(0, 0), partition=0).wait(5)
    publisher.publish(REWARDS, reward(Coordinates(partition=1, offset=0)), partition=1).wait(5)
    found = since_it_began(bus, NOTHING)
    assert found.trajectory_lows == {0: 3, 1: 0}
    assert found.reward_lows == {0: 0, 1: 0}
