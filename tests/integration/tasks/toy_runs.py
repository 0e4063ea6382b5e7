"""An example's run file at toy size: processes on a real Kafka, and what they left in the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_runtime.opening import open_bus
from echo_schemas.records import Coordinates, Record
from echo_schemas.topics import Topic
from echo_settings import load_settings

ROOT = Path(__file__).parents[3]
RUN_S = 1_500
R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyRun:
    """A run that has ended: its summary, its processes' logs, and the log of records."""

    summary: Mapping[str, Any]
    logs: str
    bus: Bus

    def records(self, topic: Topic, kind: type[R]) -> dict[Coordinates, R]:
        """The run's records of one kind, by where they lie."""
        with closing(self.bus.reader([topic])) as reader:
            reader.start()
            messages = [message for batch in reader.read_to_end(Deadline.after(60)) for message in batch]
        return {message.coordinates: message.record for message in messages if isinstance(message.record, kind)}


def run_to_end(config: Path, changes: Mapping[str, str], *, folder: Path, bootstrap: str, namespace: str) -> ToyRun:
    """`echoswarm up` with `changes` as environment variables, to its last step. Fails with all logs if it does not get there."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
        **changes,
        "ECHO_KAFKA__BOOTSTRAP": bootstrap,
        "ECHO_KAFKA__NAMESPACE": namespace,
        "ECHO_CHECKPOINT__FOLDER": str(folder / "run"),
    }
    command = [sys.executable, "-m", "echo_ops.cli", "up", "--config", str(config), "--plain"]
    found = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)
    texts = {log.name: log.read_text(encoding="utf-8") for log in sorted(folder.glob("run/logs/*.log"))}
    endings = "".join(f"\n--- {name}\n{text[-3_000:]}" for name, text in texts.items())
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{endings}"
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return ToyRun(summary=summary, logs="".join(texts.values()), bus=open_bus(load_settings(config, environ), "test"))
