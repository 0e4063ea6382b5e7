"""Reward applications as child processes on a real Kafka, and the two ends of their pipe."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_bus.requests.dispatch import WorkObserver
from echo_runtime.announcement import read_announcement
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import Coordinates, Reward, Trajectory
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_settings import Settings, load_settings
from tests.contract.conftest import create_topics

PARTITIONS = 4
# A process needs three seconds of CPU before it reads; a loaded machine has little of that to give.
WAIT_S = 120.0
JUDGES = Path(__file__).with_name("judges.py")


class Child:
    """One process of `echoswarm run reward`."""

    def __init__(self, folder: Path, name: str, *options: str, is_named: bool = True) -> None:
        self._announce = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        command = [sys.executable, "-m", "echo_ops.cli", "run", "reward", "--config", "run.toml"]
        command += ["--announce", str(self._announce), "--log-file", str(self._log), *options]
        command += ["--name", name] if is_named else []
        self.name = name
        self._errors = folder / f"{name}.err"
        with self._errors.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(command, cwd=folder, stderr=errors)

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Every sample of the metrics page, by name and label values; empty before there is a page."""
        announced = read_announcement(self._announce)
        if announced is None:
            return {}
        url = announced.url
        with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_S) as page:
            text = page.read().decode()
        return {
            (sample.name, tuple(sample.labels[label] for label in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, *labels: str) -> float:
        """One sample; 0 if it is not there."""
        return self.metrics().get((name, labels), 0.0)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Its exit status, once it has one."""
        return self.process.wait(WAIT_S)

    @property
    def log(self) -> str:
        """What it logged, and what it wrote to standard error, the sentence it ended with for one."""
        return (self._log.read_text(encoding="utf-8") if self._log.exists() else "") + self._errors.read_text(encoding="utf-8")


class Stage:
    """A namespace with all topics, a folder with the run's file and the judges, and whatever is started there."""

    def __init__(
        self,
        folder: Path,
        bootstrap: str,
        namespace: Namespace,
        rewards: dict[str, float],
        *,
        login: Mapping[str, str] | None = None,
        administrator: Mapping[str, str] | None = None,
        administered_at: str = "",
    ) -> None:
        """`login`: client properties of the processes; `administrator`: the test's own, at another address if need be."""
        self.folder, self.namespace = folder, namespace
        (folder / "my_rewards.py").write_text(JUDGES.read_text(encoding="utf-8"), encoding="utf-8")
        lines = [f'"{name}" = {weight}' for name, weight in rewards.items()]
        lines += ["[kafka.client]", *(f'"{name}" = {json.dumps(value)}' for name, value in (login or {}).items())]
        (folder / "run.toml").write_text(
            f'[run]\nname = "demo"\n[kafka]\nbootstrap = "{bootstrap}"\nnamespace = "{namespace.name}"\n[rewards]\n' + "\n".join(lines),
            encoding="utf-8",
        )
        self.settings: Settings = load_settings(folder / "run.toml", {})
        kafka = self.settings.kafka.model_copy(update={"client": dict(administrator or {}), "bootstrap": administered_at or bootstrap})
        self.bus: Bus = open_bus(self.settings.model_copy(update={"kafka": kafka}), "tester")
        create_topics(self.bus.cluster, {f"{namespace.name}.{spec.name}": min(PARTITIONS, spec.partitions) for spec in load_topic_specs()})
        self._children: list[Child] = []
        self._reader = self.bus.reader([REWARDS])
        self._reader.start()
        self.rewards: list[Reward] = []

    def start(self, name: str, *options: str, is_named: bool = True) -> Child:
        child = Child(self.folder, name, *options, is_named=is_named)
        self._children.append(child)
        return child

    def forget(self, child: Child) -> None:
        """`child` has ended as it should, which is no reason to stop waiting for the others."""
        self._children.remove(child)

    def close(self) -> None:
        self._reader.close()
        for child in self._children:
            child.process.kill()
            child.process.wait(WAIT_S)

    def publish(self, records: Iterable[Trajectory], **properties: Any) -> list[Coordinates]:
        """Write trajectories; where they lie. `properties` of the producer, with underscores for dots."""
        changes = {name.replace("_", "."): value for name, value in properties.items()}
        publisher = self.bus.publisher({**profiles.PRODUCER_THROUGHPUT, **changes})
        try:
            receipts = [publisher.publish(TRAJECTORIES, record) for record in records]
            return [receipt.wait(WAIT_S) for receipt in receipts]
        finally:
            publisher.close()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition`, reading rewards meanwhile."""
        deadline = Deadline.after(WAIT_S)
        while not condition():
            self.rewards += [message.record for message in self._reader.read(timeout_s=0.1) if isinstance(message.record, Reward)]
            ended = [child for child in self._children if child.process.poll() not in {None, 0, -signal.SIGKILL}]
            if ended:
                pytest.fail(f"{ended[0].name} ended while the test waited for {what}:\n{ended[0].log[-3000:]}")
            if deadline.expired():
                logs = "\n".join(child.log[-1500:] for child in self._children)
                pytest.fail(f"waited for {what}; {len(self.rewards)} rewards came\n{logs}")

    def wait_for(self, places: Iterable[Coordinates], name: str | None = None) -> None:
        """Wait until all of them are judged, by the reward of that name."""
        wanted = set(places)
        self.wait(lambda: wanted <= self.judged(name), f"rewards for {len(wanted)} trajectories")

    def judged(self, name: str | None = None) -> set[Coordinates]:
        """What has a reward, or one of that name."""
        return {reward.of for reward in self.rewards if name is None or reward.name == name}

    def outstanding(self, group: str = "main") -> int:
        """Trajectories that the application has not committed."""
        observer = WorkObserver(
            self.bus.cluster, physical=self.namespace.topic(TRAJECTORIES), group=self.namespace.group("reward", group), client_id="observer"
        )
        try:
            return sum(work.outstanding for work in observer.observe(PARTITIONS).values())
        finally:
            observer.close()

    def num_members(self, group: str = "main") -> int:
        """Members of the application's group."""
        admin = self.bus.cluster.admin()
        (described,) = admin.describe_consumer_groups([self.namespace.group("reward", group)]).values()
        return len(described.result(WAIT_S).members)
