"""A real Prometheus finds the processes of a run, and alerts fire by their causes and end as their runbooks say."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import yaml

from echo_ops.monitoring.rendering import render
from echo_runtime.announcement import forget_gone
from echo_schemas.topics import REQUESTS
from tests.integration.rollout.conftest import Fleet, await_in
from tests.unit.rollout.swarm import WAIT_S

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not on PATH; Debian and Ubuntu have it in the package of that name"),
]


class Prometheus:
    """A server on loopback with the files that `echoswarm monitoring render` writes, every delay in them a second."""

    def __init__(self, fleet: Fleet) -> None:
        assert PROGRAM is not None
        folder = fleet.folder / "monitoring"
        render(folder, runs=[fleet.folder])
        configuration = yaml.safe_load((folder / "prometheus.yml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        rules = yaml.safe_load((folder / "alerts.yaml").read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule["expr"] = rule["expr"].replace("offset 1m", "offset 2s")
            rule |= {"for": "1s"} if "for" in rule else {}
        (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [PROGRAM, f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={self._address}"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=log)

    def ask(self, what: str) -> dict[str, Any]:
        """The `data` of an answer of its API."""
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{what}", timeout=WAIT_S) as answer:
            return dict(json.load(answer)["data"])

    def targets(self) -> dict[str, str]:
        """The health of each process; none while it starts."""
        with suppress(OSError):
            return {target["labels"]["process"]: target["health"] for target in self.ask("targets")["activeTargets"]}
        return {}

    def firing(self, alert: str) -> list[dict[str, str]]:
        """The labels of an alert, once for each that fires."""
        alerts = self.ask("alerts")["alerts"]
        return [found["labels"] for found in alerts if found["labels"]["alertname"] == alert and found["state"] == "firing"]


@pytest.fixture
def prometheus(fleet: Fleet) -> Iterator[Prometheus]:
    started = Prometheus(fleet)
    yield started
    started.process.kill()
    started.process.wait(WAIT_S)


@pytest.mark.slow
def test_a_run_is_found_and_alerts_fire_by_their_causes_until_they_are_mended(fleet: Fleet, prometheus: Prometheus) -> None:
    fleet.launch("feeder", "f1")
    fleet.launch("worker", "w1")
    await_in(fleet, lambda: prometheus.targets() == {"feeder.f1": "up", "worker.w1": "up"}, "Prometheus to find both and to be answered")
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 20
    await_in(fleet, lambda: prometheus.ask("query?query=" + urllib.parse.quote("sum(echo_bus_records_read_total) > 0"))["result"], "series")

    # One message that nobody can read: its series begins with it.
    fleet.publisher.publish_bytes(fleet.bus.namespace.topic(REQUESTS), b"nonsense", key=None).wait(WAIT_S)
    (letter,) = await_in(fleet, lambda: prometheus.firing("EchoDeadLetters"), "the alert of a dead letter")
    assert letter["reason"] == "bad_magic"

    # A snapshot that is not what its manifest says.
    assert not prometheus.firing("EchoWeightsNotInstalled")
    fleet.publish_version(1, promise="0" * 64)
    (refusing,) = await_in(fleet, lambda: prometheus.firing("EchoWeightsNotInstalled"), "the alert of weights that are not installed")
    assert refusing["process"] == "worker.w1"
    fleet.publish_version(2)

    def is_gone() -> bool:
        # Another one may be slow to answer on a busy machine.
        return "worker.w1" in {labels["process"] for labels in prometheus.firing("EchoProcessGone")}

    assert not is_gone()
    fleet.kill("w1")
    await_in(fleet, is_gone, "the alert of a process that is gone")
    fleet.launch("worker", "w1")
    await_in(fleet, lambda: not is_gone(), "the end of the alert once the worker is back")
    fleet.kill("w1")
    await_in(fleet, is_gone, "the second alert")
    assert forget_gone(fleet.folder / "processes") == ["worker.w1"]
    await_in(fleet, lambda: not is_gone(), "the end of the alert once its file is gone")

    fleet.launch("feeder", "f2")
    (fenced,) = await_in(fleet, lambda: prometheus.firing("EchoFenced"), "the alert of a second feeder")
    assert fenced["role"] == "feeder"
    assert {rule["health"] for group in prometheus.ask("rules")["groups"] for rule in group["rules"]} == {"ok"}
