"""The newest rewards of a run are one list, however a broker mixes the partitions."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from echo_ops.rewards.recent import newest_rewards
from echo_schemas.records import Coordinates
from echo_schemas.topics import REWARDS
from tests.unit.learner.pipeline import Pipeline
from tests.unit.ops.reward_records import scored


def test_rewards_of_several_partitions_come_by_time(tmp_path: Path) -> None:
    bus = Pipeline(tmp_path).bus
    written = [
        scored("brevity", Coordinates(partition=partition, offset=offset), value=0.1 * offset, time_ms=1000 + 2 * offset + (1 - partition))
        for partition in (0, 1)
        for offset in range(5)
    ]
    with closing(bus.publisher()) as publisher:
        for reward in written:
            publisher.publish(REWARDS, reward, partition=reward.of.partition)
    found = newest_rewards(bus, 100)
    assert found == sorted(written, key=lambda reward: reward.time_ms)
    assert found != written
