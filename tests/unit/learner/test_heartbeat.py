"""What the learner says of itself on `progress`, told by two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.client.publisher import Publisher
from echo_bus.clock import Deadline, ManualClock
from echo_bus.errors import NotAuthorized
from echo_learner.heartbeat import ProgressHeartbeat
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS
from tests.unit.learner.pipeline import WAIT_S, Pipeline

FIRST = Progress(
    run_id="demo", session="s", version=0, published=0, groups_trained=0, groups_dropped=0, groups_ready=0, next_seq=0, time_ms=0
)


@pytest.fixture
def publisher(pipeline: Pipeline) -> Iterator[Publisher]:
    opened = pipeline.bus.publisher()
    yield opened
    opened.close()


def versions(pipeline: Pipeline) -> list[tuple[int, int]]:
    return [(progress.version, progress.published) for progress in pipeline.read(PROGRESS, Progress)]


def update_until(heartbeat: ProgressHeartbeat, deadline: Deadline) -> None:
    while not deadline.expired():
        heartbeat.update(next_seq=1)


def test_each_change_is_told_at_once_with_its_time(pipeline: Pipeline, publisher: Publisher) -> None:
    clock = ManualClock()
    heartbeat = ProgressHeartbeat(publisher, FIRST, clock)
    heartbeat.update(groups_trained=2)
    clock.advance(3.0)
    heartbeat.update(version=1, next_seq=7)
    first, second = pipeline.read(PROGRESS, Progress)
    assert (first.groups_trained, second.groups_trained, second.version, second.next_seq) == (2, 2, 1, 7)
    assert second.time_ms - first.time_ms == 3_000


def test_whoever_speaks_first_neither_number_goes_back(pipeline: Pipeline, publisher: Publisher) -> None:
    """Version 2 is public before the learner's own thread says that it is trained; then the learner is ahead."""
    heartbeat = ProgressHeartbeat(publisher, FIRST, ManualClock())
    heartbeat.published(2)
    heartbeat.update(version=1)
    heartbeat.update(version=5)
    heartbeat.published(4)
    assert versions(pipeline) == [(2, 2), (2, 2), (5, 2), (5, 4)]


def test_a_heartbeat_that_was_not_delivered_is_known_at_the_next_change(pipeline: Pipeline, publisher: Publisher) -> None:
    heartbeat = ProgressHeartbeat(publisher, FIRST, ManualClock())
    pipeline.cluster.faults.fail_next_produce(pipeline.namespace.topic(PROGRESS), KafkaError.TOPIC_AUTHORIZATION_FAILED)
    heartbeat.update(version=1)
    with pytest.raises(NotAuthorized, match="progress"):
        publisher.flush(WAIT_S)
    heartbeat.update(version=2)
    assert versions(pipeline) == [(2, 0)]


def test_it_repeats_itself_only_while_nothing_changes(pipeline: Pipeline, publisher: Publisher) -> None:
    heartbeat = ProgressHeartbeat(publisher, FIRST, ManualClock())
    heartbeat.update(version=1)
    heartbeat._beat()
    assert versions(pipeline) == [(1, 0)]
    heartbeat._beat()
    heartbeat._beat()
    assert versions(pipeline) == [(1, 0)] * 3


def test_an_error_of_its_own_thread_is_raised_where_somebody_looks(
    pipeline: Pipeline, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_learner.heartbeat._EVERY_S", 0.003)
    heartbeat = ProgressHeartbeat(publisher, FIRST, ManualClock())
    heartbeat.start()
    try:
        pipeline.cluster.faults.fail_next_produce(pipeline.namespace.topic(PROGRESS), KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(NotAuthorized, match="progress"):
            update_until(heartbeat, Deadline.after(WAIT_S))
    finally:
        heartbeat.close()
