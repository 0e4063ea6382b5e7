"""A second `echoswarm up` is refused before it has changed anything: in the folder of the first, or in its namespace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_memory import MemoryCluster
from echo_ops.cli import up
from echo_ops.supervisor.registration import folder_lock
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Progress, SessionClaim
from echo_schemas.topics import PROGRESS, STEPS

SPACE = Namespace("echo.test")


class Cluster(MemoryCluster):
    """Answers as a real one to whether it is there."""

    def check(self, timeout_s: float) -> int:
        del timeout_s
        return 1


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    """What `up` sees as the operator's Kafka."""
    cluster = Cluster()
    cluster.admin().create_topics([NewTopic(SPACE.topic(topic), num_partitions=1, replication_factor=1) for topic in (STEPS, PROGRESS)])
    made = Bus(
        cluster=cluster, namespace=SPACE, role="view", run_id="demo"
    )  # fmt: skip
    monkeypatch.setattr(up, "given_bootstrap", lambda bootstrap: "somewhere:9092")
    monkeypatch.setattr(up, "open_cluster", lambda settings: cluster)
    monkeypatch.setattr(up, "open_bus", lambda settings, role: made)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, with what a run that goes on has there."""
    monkeypatch.setenv("ECHO_CHECKPOINT__FOLDER", str(tmp_path / "run"))
    (tmp_path / "run" / "processes").mkdir(parents=True)
    (tmp_path / "run" / "processes" / "learner.json").write_text("{}")
    (tmp_path / "run" / "supervisor.log").write_text("of the run that goes on\n")
    return tmp_path / "run"


@pytest.fixture
def living_learner(bus: Bus) -> Iterator[SessionClaim]:
    """A learner of run `demo`, somewhere else, that speaks until the test is over."""
    claim = SessionClaim(run_id="demo", session="first", host="elsewhere", pid=7, tip_version=0, time_ms=1)
    said = Progress(
        run_id="demo", session="first", version=0, published=0, groups_trained=0, groups_dropped=0, groups_ready=0, next_seq=0, time_ms=1
    )  # fmt: skip
    publisher, stop = bus.publisher(), threading.Event()

    def speak() -> None:
        while not stop.wait(0.02):
            publisher.publish(PROGRESS, said).wait(10)

    publisher.publish(STEPS, claim).wait(10)
    publisher.publish(PROGRESS, said).wait(10)
    thread = threading.Thread(target=speak)
    thread.start()
    yield claim
    stop.set()
    thread.join()
    publisher.close()


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file() and file.name != "up.lock"}


def test_a_folder_holds_one_run_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match=r"A run is going on in .* already \(process [0-9]+ on ")
    with folder_lock(tmp_path / "run"), refused, folder_lock(tmp_path / "run"):
        pass
    with folder_lock(tmp_path / "run"):
        pass


def test_a_second_up_in_the_same_folder_changes_nothing(folder: Path, bus: Bus) -> None:
    before = contents(folder)
    with folder_lock(folder), pytest.raises(UserError, match="A run is going on in"):
        up.up(plain=True)
    assert contents(folder) == before


@pytest.mark.usefixtures("living_learner")
def test_a_second_up_from_another_folder_starts_no_role(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "plan_children", lambda *_, **__: pytest.fail("it got as far as its roles"))
    before = contents(folder)
    with pytest.raises(UserError, match="A learner is alive in this namespace: run 'demo', process 7 on elsewhere, session first"):
        up.up(plain=True)
    assert contents(folder) == before


@pytest.mark.usefixtures("living_learner")
def test_a_run_of_another_name_takes_nothing_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_RUN__NAME", "other")
    monkeypatch.setattr(up, "plan_children", lambda *_, **__: pytest.fail("it got as far as its roles"))
    with pytest.raises(UserError, match="A learner is alive in this namespace: run 'demo'"):
        up.up(plain=True, takeover=True)
