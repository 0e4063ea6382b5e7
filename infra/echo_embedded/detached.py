"""An embedded Kafka that outlives the command that started it: the work of `echoswarm kafka up`, `down` and `status`.

Concurrent commands wait for one another on a lock file in the state folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from echo_bus.clock import Deadline, SystemClock
from echo_embedded.broker import START_TIMEOUT_S, STOP_TIMEOUT_S, EmbeddedKafka
from echo_embedded.folders import exclusive, state_folder
from echo_embedded.java import DEFAULT_JVM, Jvm
from echo_embedded.ports import is_free
from echo_embedded.process import JavaProcess
from echo_embedded.readiness import answers_http, brokers_named, wait_for_brokers, wait_for_http
from echo_embedded.state import EmbeddedState, RecordedProcess, broker_name, read_state, remove_state, state_file, write_state
from echo_schemas.errors import UserError

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.05
_ANSWER_TIMEOUT_S = 10.0
_DYING_S = 2.0


@dataclass(frozen=True, slots=True)
class Status:
    """A detached Kafka: its state, its running processes, which brokers answer (by node id) and whether the registry answers."""

    state: EmbeddedState
    running: tuple[RecordedProcess, ...]
    answering: frozenset[int]
    registry_answers: bool

    @property
    def num_answering(self) -> int:
        return sum(self.answers(process) for process in self.running if self.state.address_of(process.name) is not None)

    def answers(self, process: RecordedProcess) -> bool:
        if process not in self.running:
            return False
        if self.state.address_of(process.name) is None:
            return self.registry_answers
        return any(process.name == broker_name(node_id) for node_id in self.answering)

    @property
    def healthy(self) -> bool:
        """Whether everything that was started runs and answers."""
        registry_fine = self.state.registry_url is None or self.registry_answers
        return len(self.running) == len(self.state.processes) and self.num_answering == self.state.num_brokers and registry_fine


def up(
    brokers: int | None = None,
    *,
    registry: bool = False,
    secure: bool = False,
    folder: Path | None = None,
    ports: Sequence[int] = (),
    jvm: Jvm = DEFAULT_JVM,
    report: Callable[[str], None] = _log.info,
) -> EmbeddedState:
    """Start a Kafka that outlives this command, and write the state file; blocks until it answers.

    If a Kafka of the same shape runs, it is kept, and its missing processes are started again on their old ports. If none of its processes
    runs, it starts on its old ports if they are free. `brokers` None: as before, else one. `secure`: TLS, SCRAM users and ACLs. The data
    stays in `folder` (by default in the state folder, one for each shape) between `down` and `up`. Raises UserError if a Kafka of another
    shape runs; also raises as `mend` and `EmbeddedKafka.start`.
    """
    with _locked():
        state = read_state()
        if state is not None and state.running():
            _check_shape(state, brokers, registry=registry, secure=secure, folder=folder, ports=ports)
            if len(state.running()) == len(state.processes):
                report(f"Kafka is already running at {state.bootstrap}")
            else:
                state = mend(state, report=report, timeout_s=START_TIMEOUT_S)
                write_state(state)
            return state
        brokers = brokers or (1 if state is None else state.num_brokers)
        if state is not None:
            ports = ports or _old_ports(state, brokers)
            remove_state()
        kafka = EmbeddedKafka(
            brokers,
            registry=registry,
            secure=secure,
            folder=folder or state_folder() / f"kafka-{brokers}{'-secure' if secure else ''}",
            ports=ports,
            jvm=jvm,
            report=report,
        ).start(detached=True)
        state = EmbeddedState(
            bootstrap=kafka.bootstrap,
            registry_url=kafka.registry_url if registry else None,
            folder=str(kafka.folder),
            num_brokers=brokers,
            started_ms=SystemClock().time_ms(),
            processes=tuple(
                RecordedProcess(
                    p.name, p.pid, kafka.marker, command=p.command, log=str(p.log), cwd=None if p.folder is None else str(p.folder)
                )
                for p in kafka.processes
            ),
            is_secure=secure,
        )
        write_state(state)
        return state


def down(*, delete_data: bool = False) -> EmbeddedState | None:
    """Stop the detached Kafka, orderly within 15 s, then by force; returns its state, None if there was none."""
    with _locked():
        state = read_state()
        if state is None:
            return None
        _end(state.processes, Deadline.after(STOP_TIMEOUT_S))
        remove_state()
        if delete_data:
            shutil.rmtree(state.folder, ignore_errors=True)
        return state


def status() -> Status | None:
    """The detached Kafka's status; None if none was started. Takes some seconds if its brokers do not answer."""
    state = read_state()
    if state is None:
        return None
    running = state.running()
    answering = (
        brokers_named({"bootstrap.servers": state.bootstrap, **state.client_properties}, _ANSWER_TIMEOUT_S) if running else frozenset()
    )
    registry_answers = (
        bool(running) and state.registry_url is not None and answers_http(f"{state.registry_url}/subjects", _ANSWER_TIMEOUT_S)
    )
    return Status(state=state, running=running, answering=answering, registry_answers=registry_answers)


def _old_ports(state: EmbeddedState, brokers: int) -> Sequence[int]:
    """The ports of the stopped cluster, so that its clients find it again; none if one of them is taken."""
    ports = _ports_of(state)
    if len(ports) != brokers:
        return ()
    # A killed process loses its command line first and its sockets last.
    deadline = Deadline.after(_DYING_S)
    while not all(map(is_free, ports)):
        if deadline.expired():
            return ()
        time.sleep(_LOOK_EVERY_S)
    return ports


def _ports_of(state: EmbeddedState) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in state.bootstrap.split(",")]


def _check_shape(
    state: EmbeddedState, brokers: int | None, *, registry: bool, secure: bool, folder: Path | None, ports: Sequence[int]
) -> None:
    differences = []
    if secure and not state.is_secure:
        differences.append("no security")
    if brokers is not None and state.num_brokers != brokers:
        differences.append(f"{state.num_brokers} broker(s)")
    if registry and state.registry_url is None:
        differences.append("no registry")
    if folder is not None and Path(state.folder) != folder.absolute():
        differences.append(f"its data in {state.folder}")
    if ports and list(ports) != _ports_of(state):
        differences.append("other ports")
    if differences:
        raise UserError(
            f"An embedded Kafka with {', '.join(differences)} is running at {state.bootstrap}.",
            hint="Stop it with `echoswarm kafka down` first.",
        )


def _end(processes: Sequence[RecordedProcess], deadline: Deadline) -> None:
    _signal(processes, signal.SIGCONT)
    _signal(processes, signal.SIGTERM)
    while any(process.is_running() for process in processes):
        if deadline.expired():
            _signal(processes, signal.SIGKILL)
            deadline = Deadline.after(STOP_TIMEOUT_S)
        time.sleep(_LOOK_EVERY_S)


def _signal(processes: Sequence[RecordedProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.is_running():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _locked() -> AbstractContextManager[None]:
    return exclusive(state_file().with_suffix(".lock"))


def mend(state: EmbeddedState, *, report: Callable[[str], None], timeout_s: float) -> EmbeddedState:
    """Start the recorded processes that do not run on their old ports and data, and wait until they answer; the others run on. Returns the
    state with their new process ids. A restarted process does not hold the folder's lock, which the running ones have inherited; Kafka's
    own lock protects the data.

    Raises UserError if an older version recorded them, ProcessDied, ClusterUnreachable or DeadlineExceeded; it then ends the processes
    that it has started.
    """
    missing = [process for process in state.processes if not process.is_running()]
    if any(not process.command for process in missing):
        raise UserError(
            f"{_names(missing)} of the embedded Kafka is gone, and an older version of echoswarm started it, which did not note how.",
            hint="When no run needs it: `echoswarm kafka down`, then `echoswarm kafka up`.",
        )
    report(f"Starting again what is missing: {_names(missing)}")
    started: dict[str, JavaProcess] = {}
    deadline = Deadline.after(timeout_s)
    with (Path(state.folder) / "lock").open("a") as lock:
        try:
            for each in missing:
                folder = None if each.cwd is None else Path(each.cwd)
                started[each.name] = JavaProcess(each.name, each.command, Path(each.log), lock=lock, folder=folder)
                started[each.name].start(None)
            for name, process in started.items():
                _wait(state, name, process, deadline)
        except BaseException:  # Ctrl-C while waiting must not leave some of them running
            for process in started.values():
                process.kill()
            raise
    return replace(
        state,
        processes=tuple(replace(each, pid=started[each.name].pid) if each.name in started else each for each in state.processes),
    )


def _wait(state: EmbeddedState, name: str, process: JavaProcess, deadline: Deadline) -> None:
    address = state.address_of(name)
    if address is not None:
        # Ask the broker itself: until it is fenced, the other brokers still name a broker that has just died.
        wait_for_brokers(
            {"bootstrap.servers": address, **state.client_properties}, state.num_brokers, deadline, check_alive=process.check_alive
        )
    elif state.registry_url is not None:
        wait_for_http(f"{state.registry_url}/subjects", deadline, check_alive=process.check_alive)


def _names(processes: list[RecordedProcess]) -> str:
    return ", ".join(process.name for process in processes)
