"""Restarts the missing processes of a detached Kafka on their old ports and data; the other processes run on.

A restarted process does not hold the folder's lock, which the running ones have inherited; Kafka's own lock protects the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from echo_bus.clock import Deadline
from echo_embedded.process import JavaProcess
from echo_embedded.readiness import wait_for_brokers, wait_for_http
from echo_embedded.state import EmbeddedState, RecordedProcess
from echo_schemas.errors import UserError


def mend(state: EmbeddedState, *, report: Callable[[str], None], timeout_s: float) -> EmbeddedState:
    """Start the recorded processes that do not run, and wait until they answer. Returns the state with their new process ids.

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
