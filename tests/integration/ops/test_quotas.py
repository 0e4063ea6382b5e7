"""A process under a tight client quota: it goes on, slower, and says so."""

from __future__ import annotations

import logging
import random
import time
from contextlib import closing

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_bus.metrics import BusMetrics
from echo_learner.heartbeat import ProgressHeartbeat
from echo_runtime.notices import Notices
from echo_runtime.opening import held_by_quota, open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import Progress
from echo_schemas.topics import DROPS, PROGRESS
from echo_settings import load_settings
from tests.examples import load_examples
from tests.integration.ops.quotas import set_quota

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
RATE = 20_000.0
# Kafka lets ten seconds' worth pass (quota.window.num) before it holds anything back.
RECORD_BYTES, NUM_RECORDS = 10_000, 24


def throttled_s(metrics: BusMetrics, kind: str) -> float:
    return metrics.registry.get_sample_value("echo_bus_throttled_seconds_total", {"client": kind}) or 0.0


def test_a_throttled_process_goes_on_and_says_why_it_is_slow(
    kafka_bootstrap: str, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(None, {"ECHO_KAFKA__BOOTSTRAP": kafka_bootstrap, "ECHO_KAFKA__NAMESPACE": namespace.name})
    metrics, notices = BusMetrics(CollectorRegistry()), Notices()
    bus = open_bus(settings, "learner", metrics=metrics, notices=notices)
    physical = namespace.topic(DROPS)
    # Kept in a variable: an admin client that is collected while its future runs cancels it.
    admin = bus.cluster.admin()
    for name in (physical, namespace.topic(PROGRESS)):
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(WAIT_S)
    set_quota(kafka_bootstrap, bus.client_id, producer_byte_rate=RATE, consumer_byte_rate=RATE)
    noise, started_s = random.Random(1), time.monotonic()
    with caplog.at_level(logging.WARNING), closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        for _ in range(NUM_RECORDS):
            publisher.publish_bytes(physical, noise.randbytes(RECORD_BYTES), partition=0).wait(WAIT_S)
    assert time.monotonic() - started_s > 1.0, "nothing was held back"
    assert throttled_s(metrics, "producer") > 1.0
    assert "a larger producer_byte_rate" in notices.current()["quota of its producers"]
    assert "holds this process's writing back" in caplog.text

    # What the cluster's `runs list` has of it.
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        progress = load_examples(PROGRESS)["progress.json"]
        assert isinstance(progress, Progress)
        heartbeat = ProgressHeartbeat(publisher, progress, bus.clock, read=lambda base: {"held": held_by_quota(notices)})
        heartbeat.start()
        heartbeat.close()
    told = bus.newest(PROGRESS, Progress)[progress.run_id]
    assert "holds this process's writing back" in str(told.held)

    consumer = bus.cluster.consumer({**profiles.READER, "client.id": bus.client_id})
    with closing(consumer):
        consumer.assign([TopicPartition(physical, 0, 0)])
        num_read, deadline = 0, Deadline.after(WAIT_S)
        while num_read < NUM_RECORDS or not throttled_s(metrics, "consumer"):
            assert not deadline.expired(), f"waited for {NUM_RECORDS - num_read} records and for the fetch quota"
            messages = consumer.consume(100, 0.2)
            num_read += sum(message.error() is None for message in messages)
            if num_read >= NUM_RECORDS:
                consumer.seek(TopicPartition(physical, 0, 0))
    assert "a larger consumer_byte_rate" in notices.current()["quota of its consumers"]
