"""A role waits for the topics that it uses, and for no others: a login with the least access sees no others."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.errors import TopicMissing
from echo_memory import MemoryCluster
from echo_ops.cli.run import topics_of, wait_for_topics
from echo_runtime.process import StopSignal
from echo_schemas.naming import Namespace
from echo_schemas.rights import Resource, acls_of

SPACE = Namespace("echo.test")


def _bus(role: str, *, topics: set[str]) -> Bus:
    cluster = MemoryCluster()
    cluster.admin().create_topics([NewTopic(name, num_partitions=1, replication_factor=1) for name in topics])
    return Bus(cluster=cluster, namespace=SPACE, role=role)


@pytest.mark.parametrize("role", ["feeder", "offline", "worker", "reward", "learner"])
def test_what_a_role_waits_for_is_what_its_access_lists_let_it_see(role: str) -> None:
    seen = {acl.name for acl in acls_of(SPACE) if acl.principal == f"User:{SPACE.name}.{role}" and acl.resource is Resource.TOPIC}
    assert topics_of(role, SPACE) == seen


def test_a_role_does_not_wait_for_topics_of_others() -> None:
    bus = _bus("worker.w1", topics=topics_of("worker", SPACE))
    assert wait_for_topics(bus, StopSignal(), Deadline.after(0.0))


def test_a_topic_that_is_not_there_is_named() -> None:
    bus = _bus("worker.w1", topics=topics_of("worker", SPACE) - {"echo.test.requests"})
    with pytest.raises(TopicMissing, match=r"1 topics are missing, 'echo\.test\.requests' for one") as caught:
        wait_for_topics(bus, StopSignal(), Deadline.after(0.0))
    assert "acls render" in caught.value.hint


def test_whoever_is_told_to_stop_waits_no_longer() -> None:
    stop = StopSignal()
    stop.set()
    assert not wait_for_topics(_bus("worker", topics=set()), stop, Deadline.after(60.0))
