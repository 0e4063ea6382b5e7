"""Fixtures of every test: a real Kafka and a registry, started once a session, and a namespace that no other test uses."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_embedded.folders import hold
from echo_embedded.guard import Guard
from echo_embedded.ports import free_ports
from echo_embedded.properties import HOST, NodePorts, node_properties
from echo_embedded.readiness import wait_for_brokers
from echo_embedded.registry import SchemaRegistry, install_registry
from echo_schemas.errors import EchoError
from echo_schemas.naming import Namespace
from tests.forks.process import ForkingProcess
from tests.installed import missing
from tests.thorough import IS_THOROUGH, examples

# Torch and the like make millions of objects when they are imported, and none of them is ever garbage: without this the collector looks
# through all of them again and again, for a third of the time that importing takes, in each process.
gc.disable()
_log = logging.getLogger(__name__)
# A busy machine makes no example wrong; what hangs, pytest's own time limit ends. The same examples each time: a test that passes today
# passes tomorrow. A thorough run looks further, at other ones each time.
hypothesis.settings.register_profile(
    "project",
    deadline=None,
    derandomize=not IS_THOROUGH,
    max_examples=examples(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("project")
_BOOTSTRAP_VARIABLE = "ECHO_KAFKA__BOOTSTRAP"
_REGISTRY_VARIABLE = "ECHO_REGISTRY__URL"
_CONTAINER_IMAGE = "apache/kafka:4.3.1"
_FETCH_JARS = """
from echo_embedded.installation import install_kafka
from echo_embedded.java import find_java
from echo_embedded.registry import install_registry
install_kafka(find_java(), report=print)
install_registry()
"""
_FETCH_S = 500.0
# Engines with processes of their own import vLLM three times, one after another.
_ENGINE_S = 900.0
# Tests want little CPU and an early answer more than the last microsecond.
_JVM = Jvm(jit=Jit.QUICK)
# Runs that a test starts share the cores with those of other tests: bound to the same one, they would leave another idle.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# A shell's background job ignores Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_session = uuid.uuid4().hex[:8]
_counter = itertools.count(1)


def pytest_collection_finish() -> None:
    """Everything is imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def jars() -> None:
    """The embedded broker's and registry's files are in the cache, if they can be had; who needs them says why not.

    Fetched by another process: where a repository drops a connection, the HTTP client leaves a socket to the garbage collector, and
    Python complains of it in whatever test that runs.
    """
    if not os.environ.get(_BOOTSTRAP_VARIABLE):
        subprocess.run([sys.executable, "-c", _FETCH_JARS], capture_output=True, timeout=_FETCH_S, check=False)


@pytest.fixture(autouse=True)
def _jars_of_kafka_tests(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("kafka") is not None:
        request.getfixturevalue("jars")


@pytest.fixture(scope="session")
def kafka_bootstrap(jars: None) -> Iterator[str]:
    """A real Kafka's addresses: from ECHO_KAFKA__BOOTSTRAP, else embedded, else a container, else a skip."""
    if external := os.environ.get(_BOOTSTRAP_VARIABLE):
        yield external
        return
    try:
        kafka = EmbeddedKafka(jvm=_JVM).start()
    except EchoError as exc:
        _log.warning("No embedded Kafka: %s", exc)
        yield from _container_bootstrap(str(exc))
        return
    yield kafka.bootstrap
    kafka.stop()


def _container_bootstrap(why_not_embedded: str) -> Iterator[str]:
    """The same broker with the same properties in a container, for machines that can run one but cannot fetch the jars."""
    # Asked by command, because a Docker client that finds no daemon leaves an open socket to the garbage collector.
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=30, check=False).returncode != 0:
        pytest.skip(f"No Kafka: {why_not_embedded} And no Docker answers.")
    from testcontainers.core.container import DockerContainer

    (port,) = free_ports(1)
    listeners = {"listeners": f"PLAINTEXT://0.0.0.0:{port},CONTROLLER://127.0.0.1:9093", "log.dirs": "/tmp/kafka"}
    container = DockerContainer(_CONTAINER_IMAGE)
    for key, value in node_properties(1, [NodePorts(port, 9093)], Path(), security={}, extra=listeners).items():
        container.with_env(f"KAFKA_{key.upper().replace('.', '_')}", value)
    # Published on loopback only, under the port that the broker advertises; Docker takes a pair where the type says a number.
    container.ports[f"{port}/tcp"] = (HOST, port)  # type: ignore[assignment]
    client = {"bootstrap.servers": f"{HOST}:{port}"}
    try:
        container.start()
        wait_for_brokers(client, 1, Deadline.after(120))
        yield client["bootstrap.servers"]
    finally:
        container.stop()
        container.get_docker_client().client.close()


@pytest.fixture(scope="session")
def secured_kafka(jars: None) -> Iterator[EmbeddedKafka]:
    """An embedded Kafka with TLS, SCRAM users and ACLs: `.client_properties` for the administrator, `.add_user` for others."""
    kafka = EmbeddedKafka(secure=True, jvm=_JVM)
    try:
        kafka.start()
    except EchoError as exc:
        pytest.skip(f"No embedded Kafka: {exc}")
    yield kafka
    kafka.stop()


@pytest.fixture(scope="session")
def registry_url(jars: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Confluent-compatible schema registry: from ECHO_REGISTRY__URL, else embedded, else a skip."""
    if external := os.environ.get(_REGISTRY_VARIABLE):
        yield external
        return
    folder = tmp_path_factory.mktemp("registry")
    lock = hold(folder / "lock")
    assert lock is not None, "a folder that pytest has just made is locked"
    guard = Guard()
    try:
        registry = SchemaRegistry(install_registry(), folder / "log", data=None, marker=f"-Decho.folder={folder}", lock=lock)
        registry.start(guard)
        registry.wait_ready(Deadline.after(120))
    except EchoError as exc:
        pytest.skip(f"No schema registry: {exc}")
    else:
        yield registry.url
        registry.process.kill()
    finally:
        guard.close()
        lock.close()


@pytest.fixture(scope="session")
def vllm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingProcess]:
    """Where engines on vLLM run, in forks of a process that has imported it; see tests/contract/engines/vllm_jobs."""
    if absent := missing("vllm"):
        pytest.skip(f"{', '.join(absent)} is not installed: install the extra 'rollout-cpu'")
    process = ForkingProcess("tests.contract.engines.vllm_jobs", tmp_path_factory.mktemp("vllm"), job_s=_ENGINE_S)
    yield process
    process.close()


@pytest.fixture
def namespace() -> Namespace:
    """A namespace of this test alone, so that tests share a broker without seeing one another's topics."""
    return Namespace(f"test.{_session}.{next(_counter)}")
