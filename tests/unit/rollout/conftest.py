"""Fixtures: a run over the in-memory cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs
from tests.unit.rollout.swarm import RUN, WAIT_S, Swarm

MakeSwarm = Callable[..., Swarm]


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture(scope="session")
def ending() -> Iterator[list[Swarm]]:
    """Swarms whose roles were told to end. They drain beside the tests that follow; at the end of the session all have."""
    swarms: list[Swarm] = []
    yield swarms
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(Swarm.close, swarms))


@pytest.fixture
def make_swarm(cluster: MemoryCluster, tmp_path: Path, ending: list[Swarm]) -> Iterator[MakeSwarm]:
    """Makes the run's surroundings; settings as keyword arguments by section."""
    namespace = Namespace("test.rollout")
    topics = [NewTopic(f"{namespace.name}.{spec.name}", min(4, spec.partitions), 1) for spec in load_topic_specs()]
    for future in cluster.admin().create_topics(topics).values():
        future.result(WAIT_S)
    made: list[Swarm] = []

    def make(**settings: Any) -> Swarm:
        bus = Bus(
            cluster=cluster,
            namespace=namespace,
            role="tester",
            run_id=RUN,
        )
        made.append(Swarm(bus, tmp_path, **settings))
        return made[-1]

    yield make
    for swarm in made:
        swarm.begin_close()
        ending.append(swarm)
