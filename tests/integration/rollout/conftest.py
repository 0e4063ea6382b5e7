"""Workers and feeders as processes on a real Kafka, and the test as their learner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_bus.requests.dispatch import WORKERS_GROUP
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REQUESTS
from tests.contract.conftest import create_topics
from tests.integration.rollout.parts import write_base
from tests.unit.rollout.swarm import RUN, WAIT_S, Swarm

ROOT = Path(__file__).parents[3]
NUM_PARTITIONS = 4
# The shortest that brokers allow by default: what a killed worker had is with others after so long.
SESSION_MS = 6_000


class Fleet(Swarm):
    """Roles as processes. `close` ends what runs; a process that failed shows its log."""

    def __init__(self, bus: Bus, folder: Path, bootstrap: str) -> None:
        super().__init__(bus, folder)
        self.base = write_base(folder / "base")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._bootstrap = bootstrap
        self._environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}

    def launch(
        self,
        role: str,
        name: str,
        *,
        admission: str = "pace",
        kind: str = "PacedEngine",
        drain_s: float | None = None,
        price: float = 0.0,
        weights: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a role; `engine`: options of the engine, `kind` its class. `drain_s`: of [run], None for its default. `price`: an hour.
        `weights`: the section."""
        settings = {
            "run": {"name": RUN} | ({} if drain_s is None else {"drain_s": drain_s}),
            "kafka": {
                "bootstrap": self._bootstrap,
                "namespace": self.bus.namespace.name,
                "client": {"session.timeout.ms": SESSION_MS} if role == "worker" else {},
            },
            "task": {"name": "tests.unit.rollout.swarm:LetterTask"},
            "policy": {"base": str(self.base), "max_length": 64},
            "rollout": {
                "engine": f"tests.integration.rollout.parts:{kind}",
                "group_size": 2,
                "probe_size": 0,
                "max_new_tokens": 4,
                "depth": 2,
                "heartbeat_s": 0.2,
                "price_per_hour": price,
                "options": engine,
            },
            "learner": {"groups_per_step": 4},
            "staleness": {"budget": 1, "publication_period": 1, "admission": admission},
            "coordinator": {"enabled": True, "every_s": 0.3},
            "weights": dict(weights or {}),
        }
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, "-m", "tests.integration.rollout.role_process", role, name, str(file), str(self.announcement(name))]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, env=self._environ, stdout=log, stderr=log)
        return self.processes[name]

    def announcement(self, name: str) -> Path:
        """Where a process says that it is up, as in the folder of a run."""
        return self.folder / "processes" / f"{name}.json"

    def kill(self, name: str) -> None:
        """No farewell."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)

    def tell_to_end(self, name: str) -> None:
        """SIGTERM."""
        self.processes[name].terminate()

    def await_end(self, name: str) -> None:
        """A clean end."""
        assert self.processes.pop(name).wait(WAIT_S) == 0, self.log(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")[-4_000:]

    def journal(self, worker_id: str) -> list[str]:
        """The lines of a worker's journal; none before it is there."""
        return [line for file in (self.folder / "cache").rglob(f"{worker_id}.journal") for line in file.read_text("utf-8").splitlines()]

    def owners(self) -> dict[str, set[int]]:
        """Partitions of `requests` by the client id of the worker that has them; nothing while the group has no coordinator yet."""
        group = self.bus.namespace.group(WORKERS_GROUP)
        try:
            found = self._admin.describe_consumer_groups([group])[group].result(WAIT_S)
        except KafkaException:
            return {}
        return {member.client_id: {place.partition for place in member.assignment.topic_partitions} for member in found.members}

    def committed(self) -> list[int]:
        """The workers' offsets of `requests`, by partition; nothing while the group has no coordinator yet."""
        group, topic = self.bus.namespace.group(WORKERS_GROUP), self.bus.namespace.topic(REQUESTS)
        consumer = self.bus.cluster.consumer({"group.id": group})
        try:
            places = consumer.committed([TopicPartition(topic, partition) for partition in range(NUM_PARTITIONS)], timeout=WAIT_S)
        except KafkaException:
            return []
        finally:
            consumer.close()
        return [max(0, place.offset) for place in places]

    def check_alive(self) -> None:
        """Fail with the log of a process that has ended."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self.log(name)}"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(WAIT_S)
        super().close()

    @property
    def _admin(self) -> Any:
        # Kept: an admin client that is collected while its futures run cancels them.
        if not hasattr(self, "_admin_client"):
            self._admin_client = self.bus.cluster.admin()
        return self._admin_client


@pytest.fixture
def fleet(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Iterator[Fleet]:
    """No role runs yet; version 0 is published."""
    made = open_fleet(kafka_bootstrap, namespace, tmp_path)
    yield made
    made.close()


def open_fleet(bootstrap: str, namespace: Namespace, folder: Path) -> Fleet:
    """On any Kafka. `close` it."""
    cluster = KafkaCluster(bootstrap)
    create_topics(cluster, {f"{namespace.name}.{spec.name}": min(spec.partitions, NUM_PARTITIONS) for spec in load_topic_specs()})
    bus = Bus(
        cluster=cluster,
        namespace=namespace,
        role="tester",
        run_id=RUN,
    )
    made = Fleet(bus, folder, bootstrap)
    made.publish_version(0)
    return made


def await_in(fleet: Fleet, condition: Any, what: str, timeout_s: float = 120.0) -> Any:
    """What `condition` returns once it is true; fails at once when a process ends."""
    deadline, pause = Deadline.after(timeout_s), threading.Event()
    while not (found := condition()):
        fleet.check_alive()
        assert not deadline.expired(), f"waited for {what}"
        pause.wait(0.05)
    return found
