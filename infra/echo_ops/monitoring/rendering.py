"""The files that Prometheus and Grafana need for a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from echo_ops.monitoring.dashboards import DASHBOARDS, as_grafana

RUNBOOKS = "docs/runbooks"
"""The folder of the alerts' pages, as the rule file names it."""
_SCRAPE_EVERY = "5s"


def alert_rules(runbooks: str = RUNBOOKS) -> str:
    """The rule file. `runbooks`: address of the folder that holds the pages, one for each alert, without a slash at its end."""
    text = files(__package__).joinpath("alerts.yaml").read_text(encoding="utf-8")
    return re.sub(rf"runbook_url: {RUNBOOKS}/", lambda _: f"runbook_url: {runbooks.rstrip('/')}/", text)


def scrape_configuration(runs: Sequence[Path]) -> dict[str, Any]:
    """A Prometheus configuration that finds the processes of the runs in these folders while they start and end."""
    return {
        "global": {"scrape_interval": _SCRAPE_EVERY, "evaluation_interval": _SCRAPE_EVERY},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [
            {
                "job_name": "echoswarm",
                # Prometheus allows a star only in the last part of a path.
                "file_sd_configs": [{"files": [str(run.absolute() / "processes" / "*.json") for run in runs], "refresh_interval": "10s"}],
            }
        ],
    }


def _files(runs: Sequence[Path], runbooks: str) -> Iterator[tuple[str, str]]:
    yield "alerts.yaml", alert_rules(runbooks)
    yield "prometheus.yml", yaml.safe_dump(scrape_configuration(runs), sort_keys=False)
    provider = {"name": "echoswarm", "type": "file", "folder": "EchoSwarm", "options": {"path": "/var/lib/grafana/dashboards"}}
    yield "grafana/provisioning/dashboards/echoswarm.yaml", yaml.safe_dump({"apiVersion": 1, "providers": [provider]}, sort_keys=False)
    for dashboard in DASHBOARDS:
        yield f"grafana/dashboards/{dashboard.name}.json", json.dumps(as_grafana(dashboard), indent=1) + "\n"


def render(into: Path, *, runs: Sequence[Path], runbooks: str = RUNBOOKS) -> list[Path]:
    """Write all files below `into`, over existing ones; returns their paths. `runs`: the runs' folders. Raises OSError."""
    written = []
    for name, text in _files(runs, runbooks):
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
