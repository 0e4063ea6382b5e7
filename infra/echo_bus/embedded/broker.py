"""A real Apache Kafka as child processes: one broker or three, on loopback, from Python packages alone.

`start` blocks until every broker answers, `stop` until every process has ended. Not thread-safe: one thread owns an EmbeddedKafka and its nodes. The
processes die with this one (even if it is killed), unless they were started detached.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from echo_bus.clock import Deadline
from echo_bus.embedded.guard import Guard
from echo_bus.embedded.installation import Installation, install_kafka
from echo_bus.embedded.java import Java, find_java
from echo_bus.embedded.ports import free_ports, is_free
from echo_bus.embedded.process import JavaProcess
from echo_bus.embedded.properties import HOST, NodePorts, node_properties, render
from echo_bus.embedded.storage import log_folder, open_storage
from echo_bus.errors import ClusterUnreachable, TransportError
from echo_schemas.errors import UserError

_log = logging.getLogger(__name__)
# librdkafka's own lines about brokers that are not there yet would be noise while we wait for them.
_silent = logging.getLogger(f"{__name__}.librdkafka")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False

CLUSTER_SIZES = (1, 3)
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
_ASK_EVERY_S = 0.2


class Jit(StrEnum):
    """How the JVM compiles."""

    FULL = "full"
    """Both compilers: best latency and throughput after a warm-up that costs some seconds of CPU."""
    QUICK = "quick"
    """The first compiler only: less CPU and memory; for tests."""


@dataclass(frozen=True, slots=True)
class Jvm:
    """What each broker's JVM may use."""

    heap_mb: int = 384
    jit: Jit = Jit.FULL

    def flags(self, java: Java) -> list[str]:
        """The launcher's options."""
        flags = [
            "-Xms64m",
            f"-Xmx{self.heap_mb}m",
            "-XX:+UseSerialGC",
            "-XX:-UsePerfData",
            "-XX:+ExitOnOutOfMemoryError",
            # Socket buffers are kept per thread up to this size; without it each thread keeps its largest ever.
            "-Djdk.nio.maxCachedBufferSize=262144",
            "-Djava.awt.headless=true",
        ]
        if self.jit is Jit.QUICK:
            flags.append("-XX:TieredStopAtLevel=1")
        if java.major >= 24:
            # The compression libraries are native and use Unsafe; Java says so on every start.
            flags += ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]
        return flags


class Node:
    """One broker of an embedded cluster, for tests that hurt it. Made by EmbeddedKafka."""

    def __init__(self, node_id: int, ports: NodePorts, process: JavaProcess, cluster: EmbeddedKafka) -> None:
        self.node_id = node_id
        self.ports = ports
        self.process = process
        self._cluster = cluster

    def kill(self) -> None:
        """kill -9; returns when the process is gone. Its data stays."""
        self.process.kill()
        self._cluster.forget(self)

    def suspend(self) -> None:
        """Freeze it: connections stay open, nothing answers."""
        self.process.suspend()

    def resume(self) -> None:
        """Let a suspended broker go on."""
        self.process.resume()

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """An orderly stop, with leadership handed over; killed if it takes longer than `timeout_s`."""
        self.process.terminate()
        if not self.process.wait(Deadline.after(timeout_s)):
            self.process.kill()
        self._cluster.forget(self)

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start it again on its data and ports; returns when the whole cluster answers again."""
        self._cluster.launch(self)
        self._cluster.wait_ready(Deadline.after(timeout_s))


class EmbeddedKafka:
    """An Apache Kafka of one or three brokers.

    `folder` keeps the data between runs; without one it lives in a temporary folder and goes with `stop`. `ports` are the clients' ports, one a
    broker; chosen if empty. `properties` are added to every server.properties and win over ours. The first start of a user downloads Kafka
    (see `installation`) and says so through `report`.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        folder: Path | None = None,
        ports: Sequence[int] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
        jvm: Jvm = Jvm(),
        report: Callable[[str], None] = _log.info,
    ) -> None:
        if brokers not in CLUSTER_SIZES:
            raise UserError(
                f"An embedded cluster has 1 or 3 brokers, not {brokers}.", hint="Three is what a quorum needs."
            )
        if ports and len(ports) != brokers:
            raise UserError(f"{brokers} broker(s) need as many ports, and {len(ports)} were named.")
        self.nodes: list[Node] = []
        self._num_brokers = brokers
        self._wanted_folder = folder
        self._wanted_ports = list(ports)
        self._extra = dict(properties)
        self._jvm = jvm
        self._report = report
        self._folder: Path | None = None
        self._guard: Guard | None = None
        self._detached = False

    @property
    def bootstrap(self) -> str:
        """`host:port,…` of every broker. Raises TransportError before `start`."""
        if not self.nodes:
            raise TransportError("The embedded Kafka has not been started.")
        return ",".join(f"{HOST}:{node.ports.broker}" for node in self.nodes)

    @property
    def folder(self) -> Path:
        """Where data and logs are. Raises TransportError before `start`."""
        if self._folder is None:
            raise TransportError("The embedded Kafka has not been started.")
        return self._folder

    def start(self, *, detached: bool = False, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start every broker and wait until the cluster answers.

        Raises UserError (no Java, no network for the first download, port taken, foreign folder) or TransportError with the log's last lines if a
        JVM dies; whatever was started by then is stopped.
        """
        java = find_java()
        installation = install_kafka(java, report=self._report)
        self._detached = detached
        try:
            self._prepare(java, installation)
            for node in self.nodes:
                self.launch(node)
            self.wait_ready(Deadline.after(timeout_s))
        except BaseException:  # Ctrl-C while waiting must not leave brokers behind
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop every broker; idempotent. A temporary folder is deleted, so its brokers are not given time to flush."""
        temporary = self._wanted_folder is None
        for node in self.nodes:
            node.process.resume()
            if not temporary:
                node.process.terminate()
        deadline = Deadline.after(0 if temporary else STOP_TIMEOUT_S)
        for node in self.nodes:
            if node.process.is_running() and (temporary or not node.process.wait(deadline)):
                node.process.kill()
            self.forget(node)
        self.nodes = []
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if temporary and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def launch(self, node: Node) -> None:
        """Start one node's process; does not wait. For `Node.start`."""
        node.process.start(detached=self._detached)
        if not self._detached:
            self._guard = self._guard or Guard()
            self._guard.protect(node.process.pid)

    def forget(self, node: Node) -> None:
        """A node's process has ended; for `Node.kill`."""
        if self._guard is not None:
            self._guard.release(node.process.pid)

    def wait_ready(self, deadline: Deadline) -> None:
        """Block until the metadata names every broker. Raises ClusterUnreachable at the deadline, TransportError if a JVM died."""
        config: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.bootstrap,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "log_level": 0,
        }
        admin = AdminClient(config, logger=_silent)
        seen = 0
        while not deadline.expired():
            for node in self.nodes:
                node.process.check_alive()
            try:
                seen = len(admin.list_topics(timeout=_ASK_EVERY_S).brokers)
            except KafkaException:
                continue
            if seen == self._num_brokers:
                return
        logs = self.folder / "logs"
        raise ClusterUnreachable(
            f"Only {seen} of {self._num_brokers} embedded broker(s) answered in time.", hint=f"See the logs in {logs}."
        )

    def _prepare(self, java: Java, installation: Installation) -> None:
        """Choose the folder and the ports, and write every node's properties."""
        if self._wanted_folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="echoswarm-kafka-"))
        else:
            self._folder = self._wanted_folder.absolute()
            self._folder.mkdir(parents=True, exist_ok=True)
        storage = self._folder / "storage"
        open_storage(storage, num_brokers=self._num_brokers, secure=False, installation=installation)
        all_ports = self._choose_ports()
        flags = [
            *self._jvm.flags(java),
            f"-Dlog4j2.configurationFile={installation.log_settings}",
            "-cp",
            installation.class_path(),
        ]
        for node_id, ports in enumerate(all_ports, start=1):
            file = self._folder / f"node-{node_id}.properties"
            properties = node_properties(
                node_id, all_ports, log_folder(storage, node_id), security={}, extra=self._extra
            )
            file.write_text(render(properties), encoding="utf-8")
            command = [str(java.executable), *flags, "kafka.Kafka", str(file)]
            process = JavaProcess(f"Broker {node_id}", command, self._folder / "logs" / f"node-{node_id}.log")
            self.nodes.append(Node(node_id, ports, process, self))

    def _choose_ports(self) -> list[NodePorts]:
        for port in self._wanted_ports:
            if not is_free(port):
                raise UserError(
                    f"Port {port} is taken.", hint="Stop what listens there, name another port, or let one be chosen."
                )
        chosen = free_ports(2 * self._num_brokers)
        brokers = self._wanted_ports or chosen[: self._num_brokers]
        return [
            NodePorts(broker, controller)
            for broker, controller in zip(brokers, chosen[self._num_brokers :], strict=True)
        ]
