"""The address of a process, in a file that Prometheus can also read: a list of targets in the format of its `file_sd`.

The labels identify a run's processes. Prometheus does not store labels whose names begin with `__meta_`.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_PID = "__meta_echo_pid"
_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One process. `target`: host:port of its metrics; `process`: `<role>[.<name>]`."""

    target: str
    namespace: str
    run: str
    role: str
    process: str
    pid: int

    @property
    def url(self) -> str:
        """The base address of /metrics, /healthz and /readyz."""
        return f"http://{self.target}"

    def write(self, path: Path) -> None:
        """Write the file with one rename, so that a reader never sees a part of it."""
        labels = {"namespace": self.namespace, "run": self.run, "role": self.role, "process": self.process, _PID: str(self.pid)}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(json.dumps([{"targets": [self.target], "labels": labels}]), encoding="utf-8")
        unfinished.replace(path)


def read_announcement(path: Path) -> Announcement | None:
    """The announcement in a file; None if it is missing or incomplete."""
    try:
        (entry,) = json.loads(path.read_text(encoding="utf-8"))
        (target,), labels = entry["targets"], entry["labels"]
        known = {name: str(labels[name]) for name in ("namespace", "run", "role", "process")}
        return Announcement(target=str(target), pid=int(labels[_PID]), **known)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def forget_gone(folder: Path) -> list[str]:
    """Remove the announcements in `folder` of processes that have ended: nobody listens at their address. Returns their names."""
    gone = []
    for path in sorted(folder.glob("*.json")):
        announced = read_announcement(path)
        if announced is None:
            continue
        address = urlsplit(announced.url)
        try:
            socket.create_connection((address.hostname, address.port), _CONNECT_S).close()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            gone.append(announced.process)
        except OSError:
            # Its machine does not answer: it may be cut off.
            continue
    return gone
