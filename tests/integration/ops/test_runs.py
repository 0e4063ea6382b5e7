"""`echoswarm runs` on a real broker: what is wanted of a run is in the log, and a run is removed without a trace, or beside another one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from echo_bus.bus import Bus
from echo_bus.client.consumer_queries import open_asker
from echo_bus.clock import Deadline
from echo_bus.message import raw_headers
from echo_ops.runs import deletion
from echo_ops.runs.listing import read_runs
from echo_ops.supervisor.registration import folder_lock
from echo_replay.raw_log import RawLog
from echo_rollout.journal import CrashJournal, journals_folder
from echo_runtime.opening import open_bus
from echo_schemas.headers import RUN
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, Drop, Progress, Run, RunState
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import CONTROL, DROPS, PROGRESS, RUNS, TRAJECTORIES
from echo_settings import load_settings
from tests.examples import load_examples
from tests.integration.ops.test_commands import Shell
from tests.thorough import only_thorough
from tests.unit.schemas.samples import trajectory

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
# A learner that spoke so far ahead is alive however long a command takes to look on a busy machine.
ALIVE_MS = 3_600_000


@pytest.fixture
def shell(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Shell:
    shell = Shell(
        tmp_path,
        ECHO_KAFKA__BOOTSTRAP=kafka_bootstrap,
        ECHO_KAFKA__NAMESPACE=namespace.name,
        ECHO_RUN__NAME="demo",
        ECHO_CHECKPOINT__FOLDER=str(tmp_path / "runs" / "demo"),
    )
    assert shell("topics", "apply").returncode == 0
    return shell


@pytest.fixture
def bus(shell: Shell) -> Bus:
    return open_bus(load_settings(None, shell.environ), "learner")


def begin(bus: Bus, name: str, *, heard_ms: int) -> None:
    """What a learner writes of a run."""
    run = next(record for record in load_examples(RUNS).values() if isinstance(record, Run))
    progress = load_examples(PROGRESS)["progress.json"]
    assert isinstance(progress, Progress)
    publisher = bus.publisher()
    config = json.dumps({"learner": {"steps": 100}})
    receipts = [
        publisher.publish(RUNS, replace(run, run_id=name, config=config, created_ms=heard_ms)),
        publisher.publish(PROGRESS, replace(progress, run_id=name, version=3, published=3, time_ms=heard_ms)),
        publisher.publish(TRAJECTORIES, trajectory(seq=1, run_id=name, group_id=f"{name}/1")),
    ]
    for receipt in receipts:
        receipt.wait(WAIT_S)
    publisher.close()


def topics_of(bootstrap: str, namespace: Namespace) -> list[str]:
    known = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=WAIT_S).topics
    return [name for name in known if name.startswith(f"{namespace.name}.")]


def wait_for_no_topics(bootstrap: str, namespace: Namespace) -> None:
    """A broker tells of what its controller has removed a moment later."""
    deadline = Deadline.after(WAIT_S)
    while left_over := topics_of(bootstrap, namespace):
        assert not deadline.expired(), f"waited for {left_over} to go"


def kept(bus: Bus, run: str) -> set[tuple[object, ...]]:
    """Every committed record of a run, with its place and its time."""
    found: set[tuple[object, ...]] = set()
    for spec in load_topic_specs():
        with RawLog(bus, f"{bus.namespace.name}.{spec.name}") as log:
            for raw in (raw for batch in log.messages() for raw in batch):
                headers = raw_headers(raw)
                if dict(headers).get(RUN) == run.encode():
                    found.add((raw.topic(), raw.partition(), raw.offset(), raw.timestamp()[1], raw.key(), raw.value(), *headers))
    return found


def test_a_run_is_paused_stopped_and_let_go_on_by_orders_in_the_log(shell: Shell, bus: Bus) -> None:
    assert "No run was ever accepted" in shell("runs", "list").stdout
    assert "has no run 'demo'" in shell("runs", "pause", "demo").stderr
    begin(bus, "demo", heard_ms=bus.clock.time_ms() + ALIVE_MS)
    (line,) = json.loads(shell("runs", "list", "--json").stdout)
    assert (line["run"], line["standing"], line["version"], line["steps"]) == ("demo", "training", 3, 100)
    for command, state in (("pause", RunState.PAUSED), ("stop", RunState.STOPPING), ("resume", RunState.RUNNING)):
        done = shell("runs", command, "demo")
        assert done.returncode == 0, done.stderr
        order = bus.newest(CONTROL, Control)["demo/run"]
        assert order.run is not None
        assert order.run.state is state
        assert "has that order already" in shell("runs", command, "demo").stdout
    shown = shell("runs", "show", "demo").stdout
    assert "3 of 100" in shown
    assert "running, by" in shown


def test_a_run_that_is_alone_is_removed_without_a_trace(
    shell: Shell, bus: Bus, kafka_bootstrap: str, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bus, "demo", heard_ms=bus.clock.time_ms() + ALIVE_MS)
    assert "Stop it first" in shell("runs", "delete", "demo", "--yes").stderr
    begin(bus, "demo", heard_ms=1)
    asker = open_asker(bus.cluster, namespace.group("worker"), bus.client_id)
    asker.commit(offsets=[TopicPartition(namespace.topic(TRAJECTORIES), 0, 1)], asynchronous=False)
    asker.close()
    folder = tmp_path / "runs" / "demo"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "learner.log").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shell.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    journals = journals_folder(bus, "demo")
    CrashJournal(journals / "w1.journal").close()
    said = shell("runs", "delete", "demo")
    assert "Nothing was removed" in said.stdout, said
    assert journals.exists()
    assert namespace.group("worker") in said.stdout
    assert len(topics_of(kafka_bootstrap, namespace)) == 26
    done = shell("runs", "delete", "demo", "--yes")
    assert done.returncode == 0, done.stderr
    wait_for_no_topics(kafka_bootstrap, namespace)
    assert not folder.exists()
    assert not journals.exists()
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    groups = admin.list_consumer_groups(request_timeout=WAIT_S).result().valid
    assert not [group.group_id for group in groups if group.group_id.startswith(f"{namespace.name}.")]


@only_thorough
def test_a_run_is_archived_deleted_and_restored_byte_for_byte(shell: Shell, bus: Bus, namespace: Namespace) -> None:
    begin(bus, "demo", heard_ms=1)
    begin(bus, "other", heard_ms=1)
    # The marks of transactions take offsets too.
    writer = bus.transactions()
    writer.start()
    drop = next(record for record in load_examples(DROPS).values() if isinstance(record, Drop))
    for seq in range(3):
        with writer.transaction() as transaction:
            transaction.publish(DROPS, replace(drop, run_id="demo", group_id=f"demo/{seq}", seq=seq))
    writer.close()
    before = kept(bus, "demo")
    assert len(before) == 6
    done = shell("runs", "archive", "demo", "--to", "archives")
    assert done.returncode == 0, done.stderr
    assert "has held records already" in " ".join(shell("runs", "restore", "archives/demo").stderr.split())
    admin = bus.cluster.admin()
    for future in admin.delete_topics(topics_of(shell.environ["ECHO_KAFKA__BOOTSTRAP"], namespace)).values():
        future.result(WAIT_S)
    assert shell("topics", "apply").returncode == 0
    restored = shell("runs", "restore", "archives/demo")
    assert restored.returncode == 0, restored.stderr
    assert kept(bus, "demo") == before
    assert shell("topics", "check").returncode == 3, "the limits of age were lifted"


@pytest.mark.parametrize("killed_before", ["_remove_files", "second _delete_topics"])
def test_a_removal_that_was_killed_is_finished_by_the_next(
    bus: Bus, kafka_bootstrap: str, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_before: str
) -> None:
    begin(bus, "demo", heard_ms=1)
    folder = tmp_path / "runs" / "demo"
    with folder_lock(folder):
        (folder / "report.html").write_text("x")
    every, step = replace(bus, run_id=None), killed_before.removeprefix("second ")
    left = 1 if killed_before.startswith("second") else 0
    do = getattr(deletion, step)

    def killed(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        do(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(deletion, step, killed)
        with pytest.raises(KeyboardInterrupt):
            deletion.remove(every, deletion.find_remains(every, "demo", folder, is_alone=True))
    assert [line.run.run_id for line in read_runs(every)] == ["demo"], "whoever types the same again finds it"
    deletion.remove(every, deletion.find_remains(every, "demo", folder, is_alone=True))
    wait_for_no_topics(kafka_bootstrap, namespace)
    assert not folder.exists()


def test_a_run_beside_another_leaves_the_other_as_it_is(shell: Shell, bus: Bus, kafka_bootstrap: str, namespace: Namespace) -> None:
    begin(bus, "demo", heard_ms=1)
    begin(bus, "other", heard_ms=2)
    said = shell("runs", "delete", "demo", "--yes")
    assert said.returncode == 0, said.stderr
    assert "other is in the same topics" in said.stdout
    runs = replace(bus, run_id=None).newest(RUNS, Run)
    assert set(runs) == {"other"}
    assert set(replace(bus, run_id=None).newest(PROGRESS, Progress)) == {"other"}
    assert len(topics_of(kafka_bootstrap, namespace)) == 26
    assert "its own file" in shell("runs", "delete", "other", "--yes").stderr
