"""A real Prometheus finds the processes of a run, and alerts fire by their causes and end as their runbooks say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echo_runtime.announcement import forget_gone
from echo_schemas.topics import REQUESTS
from tests.integration.alerts.prometheus import PROGRAM, WHY_NOT, Prometheus
from tests.integration.rollout.conftest import Fleet, await_in
from tests.unit.rollout.swarm import WAIT_S

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT),
]


@pytest.fixture
def prometheus(fleet: Fleet) -> Iterator[Prometheus]:
    started = Prometheus(fleet.folder / "monitoring", [fleet.folder])
    yield started
    started.close()


@pytest.mark.slow
def test_a_run_is_found_and_alerts_fire_by_their_causes_until_they_are_mended(fleet: Fleet, prometheus: Prometheus) -> None:
    fleet.launch("feeder", "f1")
    fleet.launch("worker", "w1")
    await_in(fleet, lambda: prometheus.targets() == {"feeder.f1": "up", "worker.w1": "up"}, "Prometheus to find both and to be answered")
    assert len(prometheus.rules()) > 20
    await_in(fleet, lambda: prometheus.query("sum(echo_bus_records_read_total) > 0"), "series")

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
    with fleet.processes.pop("f1") as older:
        try:
            (fenced,) = await_in(fleet, lambda: prometheus.firing("EchoFenced"), "the alert of a second feeder")
        finally:
            # It ends by itself when it writes next, which may be later or before.
            older.kill()
    assert fenced["role"] == "feeder"
    fleet.announcement("f1").unlink()
    await_in(fleet, lambda: not prometheus.firing("EchoFenced"), "the end of the alert once the file of the older one is gone")
    assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
