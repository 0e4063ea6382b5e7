"""A real Apache Kafka as child processes: one broker or three, on loopback, from Python packages alone.

`start` blocks until every broker answers, `stop` until every process has ended. Not thread-safe: one thread owns an EmbeddedKafka and its
nodes. The brokers end with this process, even if it is killed, unless they were started detached.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TextIO

from confluent_kafka.admin import AdminClient

from echo_bus.clock import Deadline
from echo_bus.errors import TransportError
from echo_embedded.class_cache import exercise, flags_for, ready_class_cache
from echo_embedded.folders import hold
from echo_embedded.guard import Guard
from echo_embedded.installation import Installation, format_checkpoint, install_kafka
from echo_embedded.java import DEFAULT_JVM, Java, Jit, Jvm, find_java
from echo_embedded.memory import available_mb, check_memory
from echo_embedded.ports import free_ports, is_free
from echo_embedded.process import DeathCause, JavaProcess, ProcessDied
from echo_embedded.properties import HOST, NodePorts, node_properties, render
from echo_embedded.readiness import wait_for_brokers
from echo_embedded.registry import SchemaRegistry, install_registry
from echo_embedded.security import Security, add_scram_users
from echo_embedded.state import broker_name
from echo_embedded.storage import log_folder, open_storage, refuse_foreign
from echo_schemas.errors import UserError

_log = logging.getLogger(__name__)

CLUSTER_SIZES = (1, 3)
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
# A JVM writes the class cache as it ends, in about ten seconds.
_TRAIN_STOP_TIMEOUT_S = 120.0
_NUM_PORT_CHOICES = 3


class Node:
    """One broker of an embedded cluster, for tests that kill or freeze it. Made by EmbeddedKafka."""

    def __init__(self, node_id: int, ports: NodePorts, process: JavaProcess, launch: Callable[[Node, float], None]) -> None:
        self.node_id = node_id
        self.ports = ports
        self.process = process
        self._launch = launch

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end. Its data stays."""
        self.process.kill()

    def suspend(self) -> None:
        """Freeze it: its connections stay open, and it does not answer."""
        self.process.suspend()

    def resume(self) -> None:
        self.process.resume()

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """An orderly stop, with leadership handed over; killed if it takes longer than `timeout_s`."""
        self.process.terminate()
        if not self.process.wait(Deadline.after(timeout_s)):
            self.process.kill()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start it again on its data and ports; returns when it answers and knows all brokers of the cluster."""
        if self.process.is_running():
            raise TransportError(f"{self.process.name} is running.", hint="Kill or terminate it first.")
        self._launch(self, timeout_s)


class EmbeddedKafka:
    """An Apache Kafka of one or three brokers, with a schema registry if asked for.

    `secure` turns on TLS, SCRAM users and ACLs (see `security`); then clients also need `client_properties`.

    `folder` keeps the data between runs; without one the data lies in a temporary folder that `stop` deletes. `ports`: the clients' ports,
    one per broker; chosen if empty. `properties` are added to every server.properties and win over ours. A user's first start downloads
    Kafka (see `installation`) and reports it through `report`.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        registry: bool = False,
        secure: bool = False,
        folder: Path | None = None,
        ports: Sequence[int] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
        jvm: Jvm = DEFAULT_JVM,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        if brokers not in CLUSTER_SIZES:
            raise UserError(f"An embedded cluster has 1 or 3 brokers, not {brokers}.", hint="Three make a quorum.")
        if ports and not len(ports) == len(set(ports)) == brokers:
            raise UserError(
                f"{brokers} broker(s) need {brokers} different port(s); named: {', '.join(map(str, ports))}.",
                hint="Without any, free ones are chosen.",
            )
        self.nodes: list[Node] = []
        self._num_brokers = brokers
        self._wants_registry = registry
        self._secure = secure
        self._security: Security | None = None
        self._registry: SchemaRegistry | None = None
        self._wanted_folder = folder
        self._wanted_ports = list(ports)
        self._extra = dict(properties)
        self._jvm = jvm
        self._report = report
        self._folder: Path | None = None
        self._lock: TextIO | None = None
        self._guard: Guard | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port,…` of every broker. Raises TransportError unless started."""
        if not self.nodes:
            raise TransportError("The embedded Kafka is not started.")
        return _addresses(self.nodes)

    @property
    def client_properties(self) -> dict[str, str]:
        """Further properties of the administrator's clients; empty unless the cluster is secured."""
        return {} if self._security is None else self._security.client_properties()

    def add_user(self, name: str, password: str) -> dict[str, str]:
        """Give a secured cluster a user without any rights; returns that user's client properties. Raises TransportError."""
        if self._security is None:
            raise TransportError("Only a secured embedded Kafka that is started has users.")
        admin = AdminClient({"bootstrap.servers": self.bootstrap, **self.client_properties})
        add_scram_users(admin, {name: password})
        return self._security.client_properties(name, password)

    @property
    def registry_url(self) -> str:
        """The address of the registry's Confluent API. Raises TransportError unless started with `registry=True`."""
        if self._registry is None:
            raise TransportError("The embedded Kafka was not started with a schema registry.")
        return self._registry.url

    @property
    def processes(self) -> tuple[JavaProcess, ...]:
        """Every JVM of this cluster, the registry's last."""
        brokers = tuple(node.process for node in self.nodes)
        return brokers if self._registry is None else (*brokers, self._registry.process)

    @property
    def marker(self) -> str:
        """A command-line argument that only the JVMs of this cluster have."""
        return f"-Decho.folder={self.folder}"

    @property
    def folder(self) -> Path:
        """The folder of data and logs. Raises TransportError unless started."""
        if self._folder is None:
            raise TransportError("The embedded Kafka is not started.")
        return self._folder

    def start(self, *, detached: bool = False, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start every broker and wait until the cluster answers.

        Raises UserError (no Java, no network for the first download, port taken, folder of other data, too little memory), ProcessDied with
        the log's last lines if a JVM ends, or ClusterUnreachable; the processes already started are stopped.
        """
        if self._folder is not None:
            raise TransportError("The embedded Kafka is started already.")
        check_memory(self._num_brokers, registry=self._wants_registry, available=available_mb())
        java = find_java()
        installation = install_kafka(java, report=self._report)
        flags = [*self._jvm.flags(java), f"-Dlog4j2.configurationFile={installation.log_settings}"]
        if self._jvm.class_cache:
            flags += flags_for(ready_class_cache(java, installation, self._train, report=self._report))
        registry = install_registry(report=self._report) if self._wants_registry else None
        deadline = Deadline.after(timeout_s)
        self._guard = None if detached else Guard()
        try:
            lock = self._open_folder(java, installation)
            if registry is not None:
                self._launch_registry(registry, lock)
            flags += [f"-Djava.io.tmpdir={self._scratch()}", self.marker, "-cp", installation.class_path(), "kafka.Kafka"]
            self._launch_all([str(java.executable), *flags], lock, deadline)
            if self._registry is not None:
                self._registry.wait_ready(deadline)
            if detached:
                lock.close()
        except BaseException:  # Ctrl-C while waiting must not leave brokers behind
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop every broker; idempotent. Kills brokers of a temporary folder at once, because the folder is deleted."""
        temporary = self._wanted_folder is None
        self._stop_processes(self.processes, 0.0 if temporary else STOP_TIMEOUT_S)
        self.nodes, self._registry, self._security = [], None, None
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if temporary and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _open_folder(self, java: Java, installation: Installation) -> TextIO:
        if self._wanted_folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="echoswarm-kafka-"))
        else:
            self._folder = self._wanted_folder.absolute()
            refuse_foreign(self._folder)
        self._lock = hold(self._folder / "lock")
        if self._lock is None:
            raise UserError(f"The folder {self._folder} is in use by an embedded Kafka that runs.", hint="Stop it, or name another folder.")
        self._security = Security(self._folder / "security") if self._secure else None

        def checkpoint() -> Path:
            if self._security is None:
                return installation.bootstrap_checkpoint
            own = self.folder / "security" / "bootstrap.checkpoint"
            format_checkpoint(java, installation, own, ["--add-scram", self._security.scram_option()])
            return own

        open_storage(self._folder, num_brokers=self._num_brokers, secure=self._secure, checkpoint=checkpoint)
        return self._lock

    def _scratch(self) -> Path:
        """An empty folder for the brokers' temporary files. They unpack native libraries, and one that is killed does not delete them."""
        folder = self.folder / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _launch_registry(self, installation: Path, lock: TextIO) -> None:
        data = None if self._wanted_folder is None else self.folder / "registry"
        log = self.folder / "logs" / "registry.log"
        self._registry = SchemaRegistry(installation, log, data=data, marker=self.marker, lock=lock)
        self._registry.start(self._guard)

    def _launch_all(self, command: Sequence[str], lock: TextIO, deadline: Deadline) -> None:
        """Start all nodes and wait; choose other ports if another process took a chosen one."""
        for attempt in range(1, _NUM_PORT_CHOICES + 1):
            self._make_nodes(command, lock)
            try:
                for node in self.nodes:
                    node.process.start(self._guard)
                self._wait(self.nodes, deadline)
            except ProcessDied as exc:
                if exc.cause is not DeathCause.PORT_TAKEN or self._wanted_ports or attempt == _NUM_PORT_CHOICES:
                    raise
                self._stop_processes([node.process for node in self.nodes], 0.0)
                self.nodes = []
            else:
                return

    def _make_nodes(self, command: Sequence[str], lock: TextIO) -> None:
        all_ports = self._choose_ports()
        security = {} if self._security is None else self._security.broker_properties()
        for node_id, ports in enumerate(all_ports, start=1):
            file = self.folder / f"node-{node_id}.properties"
            data = log_folder(self.folder, node_id)
            properties = node_properties(node_id, all_ports, data, security=security, extra=self._extra)
            # A secured node's properties hold the administrator's password.
            file.touch(mode=0o600)
            file.write_text(render(properties), encoding="utf-8")
            log = self.folder / "logs" / f"node-{node_id}.log"
            process = JavaProcess(broker_name(node_id), [*command, str(file)], log, lock=lock)
            self.nodes.append(Node(node_id, ports, process, self._restart))

    def _choose_ports(self) -> list[NodePorts]:
        for port in self._wanted_ports:
            if not is_free(port):
                raise UserError(
                    f"Port {port} is taken, or this user may not use it.", hint="Stop what listens there, or let a port be chosen."
                )
        chosen = free_ports(2 * self._num_brokers)
        brokers = self._wanted_ports or chosen[: self._num_brokers]
        controllers = chosen[self._num_brokers :]
        return [NodePorts(broker, controller) for broker, controller in zip(brokers, controllers, strict=True)]

    def _restart(self, node: Node, timeout_s: float) -> None:
        if self._guard is None:
            raise TransportError("A node of a detached cluster cannot be restarted.", hint="Stop the cluster and start it.")
        node.process.start(self._guard)
        # Ask the node itself: until it is fenced, the other nodes still name a node that has just died.
        self._wait([node], Deadline.after(timeout_s))

    def _wait(self, asked: Sequence[Node], deadline: Deadline) -> None:
        def check_alive() -> None:
            for node in asked:
                node.process.check_alive()

        client = {"bootstrap.servers": _addresses(asked), **self.client_properties}
        wait_for_brokers(client, self._num_brokers, deadline, check_alive=check_alive)

    def _stop_processes(self, processes: Sequence[JavaProcess], patience_s: float) -> None:
        for process in processes:
            process.resume()
            if patience_s:
                process.terminate()
        deadline = Deadline.after(patience_s)
        for process in processes:
            if process.is_running() and not process.wait(deadline):
                process.kill()

    def _train(self, output: Path) -> None:
        """Run a broker that writes its class cache to `output` as it stops."""
        # With the first compiler only, because a cache with profiles for the second one makes a start slower.
        jvm = Jvm(jit=Jit.QUICK, class_cache=False, extra_flags=(f"-XX:AOTCacheOutput={output}",))
        with EmbeddedKafka(jvm=jvm) as kafka:
            exercise(kafka.bootstrap)
            kafka.nodes[0].terminate(_TRAIN_STOP_TIMEOUT_S)


def _addresses(nodes: Sequence[Node]) -> str:
    return ",".join(f"{HOST}:{node.ports.broker}" for node in nodes)
