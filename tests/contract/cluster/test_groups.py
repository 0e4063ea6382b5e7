"""Consumer groups: shared partitions, commits, members that come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import OFFSET_INVALID, ConsumerGroupState, TopicPartition

from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster, RawConsumer
from echo_bus.clock import Deadline
from tests.contract.cluster.test_log import fill
from tests.contract.conftest import WAIT_S, Consumers, MakeTopic, read

COOPERATIVE = {k: v for k, v in profiles.GROUP_CONSUMER.items() if k != "enable.auto.commit"}


def member(consumers: Consumers, group: str, *, strategy: str = "cooperative-sticky") -> RawConsumer:
    properties = {**profiles.GROUP_CONSUMER, "group.id": group, "partition.assignment.strategy": strategy, "heartbeat.interval.ms": 200}
    consumer = consumers.cluster.consumer(properties)
    consumers.opened.append(consumer)
    return consumer


def poll_until(members: list[RawConsumer], condition: Callable[[], bool], what: str) -> None:
    deadline = Deadline.after(WAIT_S)
    while not condition():
        assert not deadline.expired(), f"waited for {what}"
        for consumer in members:
            consumer.poll(0.05)


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
def test_members_share_the_partitions_and_take_over_what_is_left(
    cluster: Cluster, make_topic: MakeTopic, consumers: Consumers, strategy: str
) -> None:
    topic = make_topic(4)
    first, second = member(consumers, f"{topic}.g", strategy=strategy), member(consumers, f"{topic}.g", strategy=strategy)
    first.subscribe([topic])
    poll_until([first], lambda: len(first.assignment()) == 4, "the first member to have everything")
    second.subscribe([topic])
    poll_until([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 2, "the partitions to be shared")
    held = {place.partition for consumer in (first, second) for place in consumer.assignment()}
    assert held == {0, 1, 2, 3}
    second.close()
    poll_until([first], lambda: len(first.assignment()) == 4, "the first member to take over")


def test_callbacks_say_what_comes_and_goes(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic(2)
    first, second = member(consumers, f"{topic}.g"), member(consumers, f"{topic}.g")
    owned: set[int] = set()
    first.subscribe(
        [topic],
        on_assign=lambda _, places: owned.update(place.partition for place in places),
        on_revoke=lambda _, places: owned.difference_update(place.partition for place in places),
    )
    poll_until([first], lambda: owned == {0, 1}, "both partitions to be assigned")
    second.subscribe([topic])
    poll_until([first, second], lambda: len(owned) == 1 and len(second.assignment()) == 1, "one partition to move")
    first.close()
    assert owned == set(), "closing gives everything up, with its callback"


def test_a_group_goes_on_where_it_committed(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic()
    fill(cluster, topic, 5)
    first = member(consumers, f"{topic}.g")
    first.subscribe([topic])
    messages = read(first, 3)
    assert [message.offset() for message in messages] == [0, 1, 2]
    first.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
    first.close()
    second = member(consumers, f"{topic}.g")
    second.subscribe([topic])
    assert read(second, 1)[0].offset() == 2
    assert second.committed([TopicPartition(topic, 0)], timeout=WAIT_S)[0].offset == 2


def test_committed_offsets_can_be_watched_without_joining(cluster: Cluster, make_topic: MakeTopic, consumers: Consumers) -> None:
    topic = make_topic(2)
    fill(cluster, topic, 4)
    worker = member(consumers, f"{topic}.g")
    worker.subscribe([topic])
    read(worker, 4)
    worker.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    watcher = consumers.open(group_id=f"{topic}.g")
    committed = watcher.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], timeout=WAIT_S)
    assert [place.offset for place in committed] == [3, OFFSET_INVALID]
    admin = cluster.admin()
    listed = {each.group_id: each.state for each in admin.list_consumer_groups(request_timeout=WAIT_S).result(WAIT_S).valid}
    assert listed[f"{topic}.g"] == ConsumerGroupState.STABLE
