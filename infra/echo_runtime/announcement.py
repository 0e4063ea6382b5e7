"""Where a process can be found, in a file that Prometheus reads too: a list of targets as its `file_sd` wants it.

The labels tell a run's processes apart; a label whose name begins with `__meta_` is dropped by Prometheus before it stores anything.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_PID = "__meta_echo_pid"


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
        """Below it are /metrics, /healthz and /readyz."""
        return f"http://{self.target}"

    def write(self, path: Path) -> None:
        """In one rename, so that a reader never sees half of it."""
        labels = {"namespace": self.namespace, "run": self.run, "role": self.role, "process": self.process, _PID: str(self.pid)}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(json.dumps([{"targets": [self.target], "labels": labels}]), encoding="utf-8")
        unfinished.replace(path)


def announcement_of_this_process(*, url: str, namespace: str, run: str, role: str, process: str) -> Announcement:
    """`url`: of its metrics server."""
    return Announcement(target=url.removeprefix("http://"), namespace=namespace, run=run, role=role, process=process, pid=os.getpid())


def read_announcement(path: Path) -> Announcement | None:
    """None if the process has not said so yet, or not to the end."""
    try:
        (entry,) = json.loads(path.read_text(encoding="utf-8"))
        (target,), labels = entry["targets"], entry["labels"]
        known = {name: str(labels[name]) for name in ("namespace", "run", "role", "process")}
        return Announcement(target=str(target), pid=int(labels[_PID]), **known)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
