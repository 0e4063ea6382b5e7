"""`up`, `status` and `down`: a Kafka that outlives the command that started it, and a schema registry beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from echo_bus.clock import Deadline
from echo_embedded import Jit, Jvm, detached, resolve_embedded, resolve_registry
from echo_embedded.folders import STATE_VARIABLE
from echo_embedded.state import EmbeddedState, read_state, state_file
from echo_schemas.errors import UserError

pytestmark = pytest.mark.kafka
QUICK = Jvm(jit=Jit.QUICK)
WAIT_S = 60.0
_UP = """
from echo_embedded import Jit, Jvm, detached
detached.up(registry=True, jvm=Jvm(jit=Jit.QUICK))
"""


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of this test's own."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def _topics(state: EmbeddedState) -> set[str]:
    return set(AdminClient({"bootstrap.servers": state.bootstrap}).list_topics(timeout=WAIT_S).topics)


def test_kafka_and_registry_outlive_the_command_and_keep_their_data(state_home: Path) -> None:
    subprocess.run([sys.executable, "-c", _UP], check=True, timeout=300)
    try:
        state = read_state()
        assert state is not None
        assert resolve_embedded() == state.bootstrap
        url = resolve_registry()
        assert url is not None
        health = detached.status()
        assert health is not None
        assert health.healthy, health
        _check_loopback_only([process.pid for process in state.processes])
        _create_topic(state.bootstrap, "kept")
        with SchemaRegistryClient({"url": url}) as client:
            schema_id = client.register_schema("kept-value", Schema('"string"', "AVRO"))
        said: list[str] = []
        assert detached.up(registry=True, jvm=QUICK, report=said.append) == state
        assert said == [f"Kafka is already running at {state.bootstrap}"]
        with pytest.raises(UserError, match=r"with 1 broker\(s\) is running"):
            detached.up(3, jvm=QUICK)
        with pytest.raises(UserError, match="with its data in"):
            detached.up(folder=state_home / "other", jvm=QUICK)

        assert detached.down() == state
        assert not state.running()
        assert detached.status() is None
        assert not state_file().exists()

        again = detached.up(registry=True, jvm=QUICK)
        assert "kept" in _topics(again)
        assert again.registry_url is not None
        with SchemaRegistryClient({"url": again.registry_url}) as client:
            assert client.get_latest_version("kept-value").schema_id == schema_id
    finally:
        detached.down(delete_data=True)
    assert not Path(state.folder).exists()
    assert detached.down() is None


@pytest.mark.usefixtures("state_home")
def test_a_crash_is_seen_and_up_starts_again_on_the_same_data() -> None:
    state = detached.up(jvm=QUICK)
    try:
        _create_topic(state.bootstrap, "kept")
        os.kill(state.processes[0].pid, signal.SIGKILL)
        deadline = Deadline.after(WAIT_S)
        while state.running():
            assert not deadline.expired(), "a killed broker still ran in the end"
        health = detached.status()
        assert health is not None
        assert not health.healthy
        with pytest.raises(UserError, match="no longer runs"):
            resolve_embedded()
        with pytest.raises(UserError, match="no longer runs"):
            resolve_registry()
        again = detached.up(jvm=QUICK)
        assert again.bootstrap == state.bootstrap, "whoever knows the address finds it again"
        assert again.registry_url is None
        assert resolve_registry() is None
        assert "kept" in _topics(again)
        with pytest.raises(UserError, match="with no registry is running"):
            detached.up(registry=True, jvm=QUICK)
    finally:
        detached.down()


@pytest.mark.usefixtures("state_home")
def test_a_broker_that_died_comes_back_on_its_port_and_the_others_are_left_alone() -> None:
    state = detached.up(3, jvm=QUICK)
    try:
        _create_topic(state.bootstrap, "kept", replicas=3)
        first, second, third = state.processes
        os.kill(second.pid, signal.SIGKILL)
        deadline = Deadline.after(WAIT_S)
        while second.is_running():
            assert not deadline.expired(), "a killed broker still ran in the end"
        health = detached.status()
        assert health is not None
        assert not health.healthy
        assert [health.answers(process) for process in state.processes] == [True, False, True]
        with pytest.raises(UserError, match=r"with 3 broker\(s\) is running"):
            detached.up(1, jvm=QUICK)

        said: list[str] = []
        mended = detached.up(report=said.append)
        assert said == ["Starting again what is missing: Broker 2"]
        assert mended.bootstrap == state.bootstrap
        assert (mended.processes[0], mended.processes[2]) == (first, third)
        assert mended.processes[1].pid != second.pid
        health = detached.status()
        assert health is not None
        assert health.healthy, health
        assert "kept" in set(AdminClient({"bootstrap.servers": mended.bootstrap.split(",")[1]}).list_topics(timeout=WAIT_S).topics)
        assert read_state() == mended
    finally:
        detached.down(delete_data=True)
    assert not mended.running()


@pytest.mark.usefixtures("state_home")
def test_a_frozen_broker_is_unhealthy_and_still_ends() -> None:
    state = detached.up(jvm=QUICK)
    os.kill(state.processes[0].pid, signal.SIGSTOP)
    health = detached.status()
    assert health is not None
    assert (len(health.running), health.num_answering, health.healthy) == (1, 0, False)
    detached.down()
    assert not state.running()


def _create_topic(bootstrap: str, name: str, replicas: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, 1, replicas)])[name].result(WAIT_S)


def _check_loopback_only(pids: list[int]) -> None:
    """No socket of these processes listens on another address than 127.0.0.1, in either address family."""
    inodes = {
        str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if descriptor.is_symlink()
    }
    listening, loopback = "0A", ("0100007F", "0000000000000000FFFF00000100007F")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    addresses = [row[1].split(":")[0] for row in rows if row[3] == listening and row[9] in inodes]
    assert len(addresses) == 4
    assert set(addresses) <= set(loopback)
