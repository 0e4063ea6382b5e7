"""The state file of an embedded Kafka that runs detached: how every command finds it.

One per state folder. Written by `detached.up` when the brokers answer, removed by `detached.down`. A process counts as ours
only while its command line still carries our marker, so a stale file never makes us talk to, or end, a stranger.
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
    """A process as the state file remembers it. `marker` is one of its command-line arguments; the rest starts it again (`mending`)."""

    name: str
    pid: int
    marker: str
    command: tuple[str, ...] = ()
    log: str = ""
    cwd: str | None = None

    def is_running(self) -> bool:
        """Whether it still runs, and is not another process under the same id."""
        return f" {self.marker} " in f" {_command_line(self.pid)} "


@dataclass(frozen=True, slots=True)
class EmbeddedState:
    """What is needed to use and to end a detached embedded Kafka. `started_ms` is in milliseconds since the epoch."""

    bootstrap: str
    registry_url: str | None
    folder: str
    num_brokers: int
    started_ms: int
    processes: tuple[RecordedProcess, ...]
    is_secure: bool = False

    @property
    def client_properties(self) -> dict[str, str]:
        """What the administrator's clients need besides `bootstrap`: nothing, unless the cluster is secured."""
        return Security(Path(self.folder) / "security").client_properties() if self.is_secure else {}

    def logins(self, namespace: str) -> Path | None:
        """Where the logins of a namespace's roles are; None unless the cluster is secured."""
        return Path(self.folder) / "logins" / namespace if self.is_secure else None

    def running(self) -> tuple[RecordedProcess, ...]:
        """Those of its processes that run now."""
        return tuple(process for process in self.processes if process.is_running())

    def address_of(self, name: str) -> str | None:
        """`host:port` of the broker that is called `name`; None for what is no broker."""
        return dict(zip(map(broker_name, range(1, self.num_brokers + 1)), self.bootstrap.split(","), strict=False)).get(name)


def broker_name(node_id: int) -> str:
    """What the process of a node is called."""
    return f"Broker {node_id}"


def state_file() -> Path:
    """Where the state is."""
    return state_folder() / "kafka.json"


def write_state(state: EmbeddedState) -> None:
    """Replace the state file in one step."""
    file = state_file()
    make_folder(file.parent)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=2) + "\n", encoding="utf-8")
    scratch.replace(file)


def read_state() -> EmbeddedState | None:
    """The state file's content, whether or not anything still runs; None if there is none. Raises UserError if unreadable."""
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
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise UserError(
            f"The state file {file} cannot be read: {exc}.", hint="Remove it; then end brokers that still run by hand."
        ) from exc


def remove_state() -> None:
    """Forget the detached Kafka."""
    state_file().unlink(missing_ok=True)


def resolve_embedded() -> str:
    """The `bootstrap` of the detached embedded Kafka. Does not connect. Raises UserError if none runs."""
    return _running_state().bootstrap


def resolve_registry() -> str | None:
    """The URL of the registry that runs beside it; None if it was started without. Raises UserError if no Kafka runs."""
    return _running_state().registry_url


def resolve_logins(bootstrap: str, namespace: str) -> Path | None:
    """Where the logins of a namespace's roles are, if `bootstrap` (an address, or `embedded`) is the embedded Kafka that runs detached, and
    it is secured."""
    state = read_state()
    return state.logins(namespace) if state is not None and bootstrap in {"embedded", state.bootstrap} else None


def _running_state() -> EmbeddedState:
    state = read_state()
    if state is None:
        raise UserError("No embedded Kafka is running.", hint=_UP_HINT)
    if not state.running():
        raise UserError("The embedded Kafka was started but runs no more.", hint=f"{_UP_HINT} Its logs: {state.folder}/logs.")
    return state


def _command_line(pid: int) -> str:
    """The command line of a running process; empty if there is none, or only a zombie."""
    proc = Path("/proc")
    if (proc / "self").exists():
        try:
            return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    return done.stdout
