"""`echoswarm tail` ends where the log ends, not where the broker is slow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

import echo_ops.cli.tail as tail_module
from echo_bus.bus import Bus
from echo_bus.errors import ClusterUnreachable
from echo_memory import MemoryCluster
from echo_ops.cli.tail import tail
from echo_schemas.naming import Namespace
from echo_schemas.topics import TRAJECTORIES
from tests.examples import load_examples

WAIT_S = 60.0


class SlowCluster(MemoryCluster):
    """Its consumers say nothing the first few times they are asked."""

    silences = 3

    def consumer(self, config: Mapping[str, Any]) -> Any:
        inner = super().consumer(config)
        poll, left = inner.poll, self.silences

        def slow_poll(timeout: float = -1) -> Any:
            nonlocal left
            if left:
                left -= 1
                return None
            return poll(timeout)

        inner.poll = slow_poll  # type: ignore[method-assign]
        return inner


def test_a_silent_broker_is_not_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, namespace = SlowCluster(), Namespace("unit.tail")
    for future in cluster.admin().create_topics([NewTopic(namespace.topic(TRAJECTORIES), num_partitions=2)]).values():
        future.result(WAIT_S)
    bus = Bus(cluster=cluster, namespace=namespace, role="tester")
    publisher = bus.publisher()
    written = next(iter(load_examples(TRAJECTORIES).values()))
    publisher.publish(TRAJECTORIES, written).wait(WAIT_S)
    publisher.close()
    monkeypatch.setattr(tail_module, "reach_bus", lambda *_args, **_options: replace(bus, run_id=None))

    tail(topic="trajectories", all_runs=True, as_json=True)

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["record"]["group_id"] == written.group_id  # type: ignore[attr-defined]

    tail(topic="trajectories", all_runs=True, worker="nobody")
    assert capsys.readouterr().err == "No such record in unit.tail.trajectories.\n"


def test_brokers_that_are_gone_are_told_to_whoever_follows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, namespace = MemoryCluster(), Namespace("unit.tail")
    for future in cluster.admin().create_topics([NewTopic(namespace.topic(TRAJECTORIES), num_partitions=1)]).values():
        future.result(WAIT_S)
    bus = Bus(cluster=cluster, namespace=namespace, role="tester")
    monkeypatch.setattr(tail_module, "reach_bus", lambda *_args, **_options: replace(bus, run_id=None))
    monkeypatch.setattr(tail_module, "_POLL_S", 0.01)
    monkeypatch.setattr(tail_module, "_SILENT_S", 0.01)
    errors: list[BaseException] = [KeyboardInterrupt(), ClusterUnreachable("No broker answers at unit.tail.trajectories.")]

    def num_partitions(*_: object) -> int:
        if len(asked) == 0:
            asked.append(1)
            return 1
        raise errors.pop()

    asked: list[int] = []
    monkeypatch.setattr(tail_module, "num_partitions", num_partitions)
    with pytest.raises(KeyboardInterrupt):
        tail(topic="trajectories", follow=True, all_runs=True)
    assert "No broker answers at unit.tail.trajectories. It goes on when they answer; Ctrl-C ends." in capsys.readouterr().err
