"""SIGTERM to a process with work in flight: it finishes, commits, leaves the group and exits with 0."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.profiles import PRODUCER_LATENCY
from echo_bus.clock import Deadline
from echo_bus.requests.dispatch import WorkObserver
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop, DropReason
from echo_schemas.topics import DROPS

NUM_MESSAGES = 20
WAIT_S = 60.0
# Half a session, at whose end it would be gone without having left.
LEFT_S = 5.0
WORKER = Path(__file__).with_name("draining_worker.py")


@pytest.mark.kafka
def test_sigterm_finishes_what_is_in_flight_and_commits_it(kafka_bootstrap: str, namespace: Namespace) -> None:
    cluster, physical = KafkaCluster(kafka_bootstrap), namespace.topic(DROPS)
    admin = cluster.admin()
    for created in admin.create_topics([NewTopic(physical, 1, 1), NewTopic(namespace.dead_letters(DROPS), 1, 1)]).values():
        created.result(WAIT_S)
    publisher = Bus(cluster=cluster, namespace=namespace, role="test").publisher(PRODUCER_LATENCY)
    for seq in range(NUM_MESSAGES):
        publisher.publish(
            DROPS, Drop(run_id="demo", group_id=f"demo/{seq}", seq=seq, why=DropReason.STALE, learner_version=0, time_ms=1), partition=0
        )
    publisher.close()

    worker = subprocess.Popen([sys.executable, str(WORKER), kafka_bootstrap, namespace.name], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        offered = [int(worker.stdout.readline()) for _ in range(NUM_MESSAGES)]
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT_S) == 0
    finally:
        worker.kill()
        worker.wait(WAIT_S)
        worker.stdout.close()  # type: ignore[union-attr]  # a pipe was asked for
    assert offered == list(range(NUM_MESSAGES))

    observer = WorkObserver(cluster, physical=physical, group=namespace.group("worker"), client_id="observer")
    try:
        assert observer.observe(1)[0].outstanding == 0
    finally:
        observer.close()
    deadline = Deadline.after(LEFT_S)
    while admin.describe_consumer_groups([group := namespace.group("worker")])[group].result(WAIT_S).members:
        assert not deadline.expired(), "waited for the group to have no members"


_NEVER_DRAINS = """
import pathlib, sys, time
from echo_runtime.process import open_role
from echo_settings import Settings
settings = Settings.model_validate({"kafka": {"bootstrap": "127.0.0.1:9"}, "run": {"drain_s": 0.1}})
with open_role(settings, "feeder", announce=pathlib.Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(60)
    time.sleep(60)
"""


def test_nobody_looks_for_a_process_that_was_told_to_end_whose_drain_was_cut_short(tmp_path: Path) -> None:
    announcement = tmp_path / "feeder.json"
    process = subprocess.Popen([sys.executable, "-c", _NEVER_DRAINS, str(announcement)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert announcement.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()  # type: ignore[union-attr]  # a pipe was asked for
    assert not announcement.exists()
