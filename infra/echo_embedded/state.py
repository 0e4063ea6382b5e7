"""The state file of an embedded Kafka that runs detached: how every command finds it.

One per state folder. `detached.up` writes it when the brokers answer, `detached.down` removes it. A process is ours only if its command
line contains our marker, so a stale file never makes us use or end another process.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from echo_embedded.folders import make_folder, state_folder
from echo_embedded.security import Security
from echo_schemas.errors import UserError

_FORMAT = 1
_UP_HINT = "Run `echoswarm kafka up`, or name a cluster in ECHO_KAFKA__BOOTSTRAP."


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """A process in the state file. `marker`: one of its command-line arguments. The others are for restarting it (`detached.mend`)."""

    name: str
    pid: int
    marker: str
    command: tuple[str, ...] = ()
    log: str = ""
    cwd: str | None = None

    def is_running(self) -> bool:
        """Whether it runs; another process with the same id does not count."""
        return f" {self.marker} " in f" {_command_line(self.pid)} "


@dataclass(frozen=True, slots=True)
class EmbeddedState:
    """The data for using and ending a detached embedded Kafka. `started_ms`: milliseconds since the epoch."""

    bootstrap: str
    registry_url: str | None
    folder: str
    num_brokers: int
    started_ms: int
    processes: tuple[RecordedProcess, ...]
    is_secure: bool = False

    @property
    def client_properties(self) -> dict[str, str]:
        """Further properties of the administrator's clients; empty unless the cluster is secured."""
        return Security(Path(self.folder) / "security").client_properties() if self.is_secure else {}

    def logins(self, namespace: str) -> Path | None:
        """The folder with the logins of a namespace's roles; None unless the cluster is secured."""
        return Path(self.folder) / "logins" / namespace if self.is_secure else None

    def running(self) -> tuple[RecordedProcess, ...]:
        return tuple(process for process in self.processes if process.is_running())

    def address_of(self, name: str) -> str | None:
        """`host:port` of the broker `name`; None for a process that is no broker."""
        return dict(zip(map(broker_name, range(1, self.num_brokers + 1)), self.bootstrap.split(","), strict=False)).get(name)


def broker_name(node_id: int) -> str:
    """The name of a node's process."""
    return f"Broker {node_id}"


def state_file() -> Path:
    return state_folder() / "kafka.json"


def write_state(state: EmbeddedState) -> None:
    """Replace the state file in one step."""
    file = state_file()
    make_folder(file.parent)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=2) + "\n", encoding="utf-8")
    scratch.replace(file)


def read_state() -> EmbeddedState | None:
    """The state file's content, whether or not the processes run; None if there is none. Raises UserError if unreadable."""
    file = state_file()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        processes = tuple(
            RecordedProcess(**{**process, "command": tuple(process.get("command", ()))}) for process in content.pop("processes")
        )
        return EmbeddedState(**content, processes=processes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise UserError(
            f"The state file {file} cannot be read: {exc}.", hint="Remove it; then end brokers that still run by hand."
        ) from exc


def remove_state() -> None:
    state_file().unlink(missing_ok=True)


def resolve_embedded() -> str:
    """The `bootstrap` of the detached embedded Kafka. Does not connect. Raises UserError if none runs."""
    return _running_state().bootstrap


def resolve_registry() -> str | None:
    """The URL of the registry of the detached Kafka; None if it has none. Raises UserError if no Kafka runs."""
    return _running_state().registry_url


def resolve_logins(bootstrap: str, namespace: str) -> Path | None:
    """The folder with the logins of a namespace's roles, if `bootstrap` (an address, or `embedded`) is the detached embedded Kafka and
    it is secured, else None."""
    state = read_state()
    return state.logins(namespace) if state is not None and bootstrap in {"embedded", state.bootstrap} else None


def _running_state() -> EmbeddedState:
    state = read_state()
    if state is None:
        raise UserError(
            "No embedded Kafka is running.",
            hint=f"{_UP_HINT} A run that was started without either has a Kafka of its own, which other commands do not find.",
        )
    if not state.running():
        raise UserError("The embedded Kafka was started, but it no longer runs.", hint=f"{_UP_HINT} Its logs: {state.folder}/logs.")
    return state


def _command_line(pid: int) -> str:
    """The command line of a running process; empty without a process, or for a zombie."""
    proc = Path("/proc")
    if (proc / "self").exists():
        try:
            return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    return done.stdout
