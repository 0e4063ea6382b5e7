"""A role as a process of its own: argv is the role, its name, the settings as a JSON file, and where it says that it is up."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from echo_rollout.run import run_feeder, run_worker
from echo_runtime.process import open_role
from echo_settings import Settings
from echo_streams.coordinator.run import run_coordinator


def main(role: str, name: str, settings_file: Path, announce: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = Settings.model_validate_json(settings_file.read_text(encoding="utf-8"))
    with open_role(settings, role, name=name, announce=announce) as process:
        if role == "worker":
            run_worker(process, worker_id=name)
        elif role == "coordinator":
            run_coordinator(process)
        else:
            run_feeder(process)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
