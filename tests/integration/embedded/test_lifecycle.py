"""The life of an embedded broker: start, stop, restart on kept data, and every way in which it cannot start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from echo_bus.clock import Deadline
from echo_bus.errors import ClusterUnreachable, TransportError
from echo_embedded import EmbeddedKafka, Jit, Jvm, readiness
from echo_embedded import broker as broker_module
from echo_embedded.guard import Guard
from echo_embedded.ports import free_ports
from echo_embedded.process import DeathCause, JavaProcess, ProcessDied
from echo_schemas.errors import UserError

pytestmark = pytest.mark.kafka
QUICK = Jvm(jit=Jit.QUICK)
WAIT_S = 60.0


def _wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = Deadline.after(timeout_s)
    while not condition():
        assert not deadline.expired(), f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    """Whether `pid` is a process that has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def _write(bootstrap: str, topic: str, value: bytes = b"value", **properties: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(WAIT_S)
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **properties})
    producer.produce(topic, value, b"key")
    assert producer.flush(WAIT_S) == 0, "the record was not acknowledged in time"


def _read(bootstrap: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(WAIT_S)
    finally:
        consumer.close()
    assert message is not None, "no record arrived in time"
    return message.value()


def test_native_libraries_that_a_killed_broker_leaves_are_in_its_own_folder_and_go_at_the_next_start(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(folder=tmp_path / "kafka", jvm=QUICK)
    with kafka:
        # The client sends a shorter value as it is.
        _write(kafka.bootstrap, "packed", b"value" * 100, **{"compression.type": "lz4"})
        kafka.nodes[0].kill()
        assert list((kafka.folder / "scratch").glob("liblz4-java*")), "The broker unpacks its library elsewhere now."
    with kafka:
        assert not list((kafka.folder / "scratch").glob("liblz4-java*"))
        assert _read(kafka.bootstrap, "packed") == b"value" * 100


def test_a_record_goes_in_and_comes_out_and_nothing_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    with EmbeddedKafka(jvm=QUICK) as kafka:
        _write(kafka.bootstrap, "echo")
        assert _read(kafka.bootstrap, "echo") == b"value"
        folder, pid = kafka.folder, kafka.nodes[0].process.pid
        with pytest.raises(TransportError, match="started already"):
            kafka.start()
        with pytest.raises(TransportError, match="is running"):
            kafka.nodes[0].start()
    assert not folder.exists()
    assert not _exists(pid)
    kafka.stop()
    assert capfd.readouterr().out == ""


def test_kept_data_survives_and_belongs_to_one_cluster_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    with EmbeddedKafka(folder=folder, jvm=QUICK) as kafka:
        _write(kafka.bootstrap, "echo")
        with pytest.raises(UserError, match="in use by an embedded Kafka that runs"):
            EmbeddedKafka(folder=folder, jvm=QUICK).start()
        assert _read(kafka.bootstrap, "echo") == b"value"
    with pytest.raises(UserError, match="a cluster of 1 broker"):
        EmbeddedKafka(3, folder=folder, jvm=QUICK).start()
    (port,) = free_ports(1)
    with EmbeddedKafka(folder=folder, ports=[port], jvm=QUICK) as again:
        assert again.bootstrap == f"127.0.0.1:{port}"
        assert _read(again.bootstrap, "echo") == b"value"


def test_a_killed_broker_starts_again_on_its_port_and_data() -> None:
    with EmbeddedKafka(jvm=QUICK) as kafka:
        _write(kafka.bootstrap, "echo")
        kafka.nodes[0].kill()
        kafka.nodes[0].start()
        assert _read(kafka.bootstrap, "echo") == b"value"


def test_a_taken_port_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} is taken"):
            EmbeddedKafka(ports=[port], jvm=QUICK).start()


def test_a_port_lost_between_choice_and_use_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        stolen: int = thief.getsockname()[1]
        choices: list[list[int]] = []

        def choose(count: int) -> list[int]:
            choices.append([stolen, *free_ports(count - 1)] if not choices else free_ports(count))
            return choices[-1]

        monkeypatch.setattr(broker_module, "free_ports", choose)
        with EmbeddedKafka(jvm=QUICK) as kafka:
            assert str(stolen) not in kafka.bootstrap
            assert len(choices) == 2


def test_a_jvm_that_dies_shows_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(folder=tmp_path / "kafka", properties={"process.roles": "nonsense"}, jvm=QUICK)
    with pytest.raises(ProcessDied, match="Invalid value nonsense for configuration") as caught:
        kafka.start()
    assert caught.value.cause is DeathCause.UNKNOWN
    with pytest.raises(TransportError, match="not started"):
        _ = kafka.bootstrap
    with EmbeddedKafka(folder=tmp_path / "kafka", jvm=QUICK) as mended:
        _write(mended.bootstrap, "echo")


def test_a_heap_that_is_too_small_is_named() -> None:
    with pytest.raises(ProcessDied) as caught:
        EmbeddedKafka(jvm=Jvm(heap_mb=16, jit=Jit.QUICK, class_cache=False)).start()
    assert caught.value.cause is DeathCause.SMALL_HEAP


def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "available_mb", lambda: 100)
    with pytest.raises(UserError, match="needs about 750 MB of memory, and 100 MB are available"):
        EmbeddedKafka(3, jvm=QUICK).start()


def test_a_broker_that_does_not_answer_in_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some brokers are up within the second that one answer may take.
    monkeypatch.setattr(readiness, "_ANSWER_S", 0.01)
    kafka = EmbeddedKafka(jvm=QUICK)
    with pytest.raises(ClusterUnreachable, match=r"Only 0 of 1 broker\(s\) answered"):
        kafka.start(timeout_s=0.01)
    assert kafka.nodes == []


# What dies with its owner


_OWNER = """
import os, signal, sys
from echo_embedded import EmbeddedKafka, Jit, Jvm
kafka = EmbeddedKafka(jvm=Jvm(jit=Jit.QUICK)).start()
print(kafka.nodes[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_brokers_die_with_an_owner_that_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", _OWNER], capture_output=True, text=True, timeout=180, check=False)
    pid = int(done.stdout)
    _wait_until(lambda: not _exists(pid), "the end of a broker whose owner was killed")


def _sleeper(tmp_path: Path, guard: Guard | None) -> JavaProcess:
    lock = (tmp_path / "lock").open("w")
    process = JavaProcess("Sleeper", [sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "log", lock=lock)
    process.start(guard)
    lock.close()
    return process


def test_a_guard_ends_only_what_was_not_released(tmp_path: Path) -> None:
    guard = Guard()
    kept, freed = _sleeper(tmp_path, guard), _sleeper(tmp_path, guard)
    guard.release(freed.pid)
    guard.close()
    _wait_until(lambda: not kept.is_running(), "the end of a protected process")
    assert freed.is_running()
    freed.kill()


def test_an_owner_whose_guard_was_killed_lives_on(tmp_path: Path) -> None:
    guard = Guard()
    guard._popen.kill()
    guard._popen.wait()
    process = _sleeper(tmp_path, guard)
    process.kill()
    guard.close()
    assert not process.is_running()


def test_signals_to_a_process_that_has_ended_do_nothing(tmp_path: Path) -> None:
    process = _sleeper(tmp_path, None)
    process.terminate()
    assert process.wait(Deadline.after(WAIT_S)), "a sleeping process did not end on SIGTERM in time"
    process.resume()
    process.kill()
    with pytest.raises(ProcessDied, match="exit code -15"):
        process.check_alive()
    assert not _exists(process.pid)


def test_the_guard_ends_with_an_owner_that_forked(tmp_path: Path) -> None:
    """A forked sibling keeps the pipe open; the guard then notices that its parent has changed."""
    script = f"""
import os, signal, sys, pathlib
from echo_embedded.guard import Guard
from echo_embedded.process import JavaProcess
guard = Guard()
lock = open({str(tmp_path / "lock")!r}, "w")
command = [sys.executable, "-c", "import signal; signal.pause()"]
process = JavaProcess("Sleeper", command, pathlib.Path({str(tmp_path / "log")!r}), lock=lock)
process.start(guard)
sibling = os.fork()
if sibling == 0:
    os.close(1)
    signal.pause()
print(process.pid, sibling, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=180, check=False)
    protected, sibling = map(int, done.stdout.split())
    try:
        _wait_until(lambda: not _exists(protected), "the end of a process whose owner was killed beside a forked sibling")
    finally:
        os.kill(sibling, 9)
