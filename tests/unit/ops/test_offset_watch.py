"""How many records a topic holds, also where it was asked for too early."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.errors import TopicMissing
from echo_memory import MemoryCluster
from echo_ops.report.offsets import OffsetWatch
from echo_schemas.naming import Namespace
from echo_schemas.topics import TRAJECTORIES

WAIT_S = 60.0
SPACE = Namespace("unit.offsets")


def test_a_topic_that_is_not_there_yet_is_asked_for_again() -> None:
    cluster = MemoryCluster()
    watch = OffsetWatch(cluster, SPACE)
    with pytest.raises(TopicMissing, match="topics apply"):
        watch.ends(TRAJECTORIES)
    physical = SPACE.topic(TRAJECTORIES)
    cluster.admin().create_topics([NewTopic(physical, 2, 1)])[physical].result(WAIT_S)
    producer = cluster.producer({})
    for partition in (0, 1, 1):
        producer.produce(physical, b"v", partition=partition)
    producer.flush(WAIT_S)
    assert watch.ends(TRAJECTORIES) == 3


def test_nobody_asks_an_admin_client_for_a_groups_offsets() -> None:
    """librdkafka ends the process when a moving coordinator answers (librdkafka#5040); `consumer_queries.committed` does not."""
    root = Path(__file__).parents[3]
    sources = [path for folder in ("infra", "producers", "streams", "consumers") for path in (root / folder).rglob("*.py")]
    assert len(sources) > 100
    assert not [path for path in sources if ".list_consumer_group_offsets(" in path.read_text(encoding="utf-8")]
