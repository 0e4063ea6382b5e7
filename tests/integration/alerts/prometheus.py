"""A real Prometheus with the files that `echoswarm monitoring render` writes, in which an hour is a minute and a half."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from echo_ops.monitoring.rendering import render

PROGRAM = shutil.which("prometheus")
WHY_NOT = "prometheus is not on PATH; Debian and Ubuntu have it in the package of that name"
FASTER = 40
"""Every window, offset and `for` of the rules is so many times shorter."""
_ANSWER_S = 30.0
# Windows, resolutions and offsets in an expression.
_DURATION = re.compile(r"(?:(?<=\[)|(?<=:)|(?<=offset ))(\d+)([smhd])(?=[\]:\s)])")
_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def shortened(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule with every duration `FASTER` times shorter."""

    def shorter(found: re.Match[str]) -> str:
        return f"{int(found[1]) * _MS[found[2]] // FASTER}ms"

    short = {**rule, "expr": _DURATION.sub(shorter, rule["expr"])}
    return short | {"for": _DURATION.sub(shorter, f"[{rule['for']}]").strip("[]")} if "for" in rule else short


class Prometheus:
    """A server on loopback that finds the processes of `runs`, folders, and asks them every second. Its files are in `folder`."""

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        assert PROGRAM is not None
        render(folder, runs=runs)
        configuration = yaml.safe_load((folder / "prometheus.yml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        rules = yaml.safe_load((folder / "alerts.yaml").read_text())
        for group in rules["groups"]:
            group["rules"] = [shortened(rule) for rule in group["rules"]]
        (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [PROGRAM, f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={self._address}"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=log)

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(_ANSWER_S)

    def ask(self, what: str) -> dict[str, Any]:
        """The `data` of an answer of its API."""
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{what}", timeout=_ANSWER_S) as answer:
            return dict(json.load(answer)["data"])

    def query(self, expression: str) -> list[float]:
        """The values of an expression now."""
        found = self.ask("query?query=" + urllib.parse.quote(expression))["result"]
        return [float(series["value"][1]) for series in found]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule that it computes."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> dict[str, str]:
        """The health of each process; none while it starts."""
        with suppress(OSError):
            return {target["labels"]["process"]: target["health"] for target in self.ask("targets")["activeTargets"]}
        return {}

    def firing(self, alert: str) -> list[dict[str, str]]:
        """The labels of an alert, once for each that fires."""
        alerts = self.ask("alerts")["alerts"]
        return [found["labels"] for found in alerts if found["labels"]["alertname"] == alert and found["state"] == "firing"]
