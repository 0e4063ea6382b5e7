"""What `echoswarm kafka status` says of a cluster with something missing, and what to type."""

from __future__ import annotations

import pytest

from echo_embedded import detached
from echo_embedded.detached import Status
from echo_embedded.state import EmbeddedState, RecordedProcess
from echo_ops.cli import kafka

STATE = EmbeddedState(
    bootstrap="127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
    registry_url=None,
    folder="/data",
    num_brokers=3,
    started_ms=1,
    processes=tuple(RecordedProcess(f"Broker {node_id}", 100 + node_id, "marker") for node_id in (1, 2, 3)),
)


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: Status) -> list[str]:
    monkeypatch.setattr(detached, "status", lambda: status)
    with pytest.raises(SystemExit):
        kafka.status()
    return capsys.readouterr().out.splitlines()


def test_a_node_that_is_gone_is_named_with_what_to_type(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    running = (STATE.processes[0], STATE.processes[2])
    lines = said(capsys, monkeypatch, Status(state=STATE, running=running, answering=frozenset({1, 2, 3}), registry_answers=False))
    assert lines[0] == f"2 of 3 brokers answer at {STATE.bootstrap}"
    assert "  Broker 2: gone, at 127.0.0.1:2, pid 102" in lines
    assert lines[-1] == "Start what is missing with echoswarm kafka up: on its old port; what runs is left alone."
    assert not any("kill" in line for line in lines)


def test_a_node_that_hangs_is_named_with_what_to_type(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = said(capsys, monkeypatch, Status(state=STATE, running=STATE.processes, answering=frozenset({1, 2}), registry_answers=False))
    assert lines[0] == f"2 of 3 brokers answer at {STATE.bootstrap}"
    assert "  Broker 3: runs and does not answer, at 127.0.0.1:3, pid 103" in lines
    assert "If these processes still do not answer, end them: kill -9 103, and go on with the next line." in lines
