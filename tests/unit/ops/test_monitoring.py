"""Alerts, runbooks and dashboards name what the code has: every metric, label and label value in them is taken from the classes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from echo_bus.clock import SystemClock
from echo_bus.metrics import BusMetrics
from echo_learner.metrics import LearnerMetrics
from echo_learner.step_metrics import METRICS
from echo_ops.cli.main import app
from echo_ops.monitoring.dashboards import DASHBOARDS, as_grafana
from echo_ops.monitoring.rendering import alert_rules, render
from echo_ops.settings_page import settings_page
from echo_rollout.metrics import FeederMetrics, WorkerMetrics
from echo_rollout.weights.watcher import InstallOutcome
from echo_runtime.places import PlaceTimes
from echo_streams.metrics import CoordinatorMetrics, StreamsMetrics

ROOT = Path(__file__).parents[3]
TARGET_LABELS = {"namespace", "run", "role", "process"}
RECORDED_LABELS = {"counter"}
RULES = [rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in ALERTS} | {
    f"{dashboard.name}: {panel.title}: {legend}": expression
    for dashboard in DASHBOARDS
    for panels in dashboard.rows.values()
    for panel in panels
    for expression, legend in panel.queries.items()
}
WORDS = {
    "by", "on", "and", "or", "unless", "without", "ignoring", "group_left", "sum", "count", "rate", "avg_over_time", "max", "increase",
    "changes", "deriv", "histogram_quantile", "max_over_time", "min_over_time", "offset", "round",
}  # fmt: skip


def registered() -> dict[str, set[str]]:
    """Name, as it is queried → labels."""
    found: dict[str, set[str]] = {"up": set()}
    registry = CollectorRegistry()
    PlaceTimes(registry, SystemClock())
    for made in (BusMetrics(registry), FeederMetrics(registry), WorkerMetrics(registry), StreamsMetrics(registry)):
        found |= _of(made)
    return found | _of(CoordinatorMetrics(registry)) | _of(LearnerMetrics(registry)) | {"echo_place_seconds_total": {"place", "use"}}


def _of(metrics: object) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for collector in vars(metrics).values():
        if isinstance(collector, MetricWrapperBase):
            (family,) = collector.describe()
            labels = set(collector._labelnames)
            names = {
                "counter": [f"{family.name}_total"],
                "gauge": [family.name],
                "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
            }[family.type]
            found |= {name: labels | ({"le"} if name.endswith("_bucket") else set()) for name in names}
    return found


KNOWN = registered()


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:echo_\w+|up)\b", expression))


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_there_are(where: str) -> None:
    expression = EXPRESSIONS[where]
    used = metrics_of(expression)
    assert used
    assert used <= set(KNOWN), used - set(KNOWN)
    labels = TARGET_LABELS.union(*(KNOWN[name] for name in used))
    grouped = {
        label for listed in re.findall(r"(?:by|on|ignoring|group_left) \(([^)]*)\)", expression) for label in listed.split(", ") if label
    }
    selected = {label for inside in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*(?:=~|!=|=)", inside)}
    assert grouped | (selected - RECORDED_LABELS) <= labels
    recorded = "|".join(sorted(RECORDED, key=len, reverse=True))
    others = rf"\b(?:{recorded})\b|\{{[^}}]*\}}|\[[^]]*\]|\b(?:by|on|ignoring|group_left) \([^)]*\)"
    names = set(re.findall(r"\b([a-z_]+)\b", re.sub(others, "", expression)))
    assert names - used <= WORDS


def test_what_is_counted_from_zero_is_what_alerts_ask_for() -> None:
    counted = {name for rule in ALERTS for name in re.findall(r'counter="(\w+)"', rule["expr"])}
    assert metrics_of(RECORDED["echo:count"]) == counted <= set(KNOWN)
    assert all(("counter=" in rule["expr"]) is ("echo:count:from_zero" in rule["expr"]) for rule in ALERTS)


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_a_step_metric_that_is_named_is_in_the_catalogue(where: str) -> None:
    named = re.findall(r'echo_learner_step\{[^}]*metric="(\w+)"', EXPRESSIONS[where])
    assert set(named) <= set(METRICS)


def test_the_outcome_that_is_no_failure_to_install_is_one_that_there_is() -> None:
    assert 'outcome!="installed"' in EXPRESSIONS["EchoWeightsNotInstalled"]
    assert InstallOutcome.INSTALLED.value == "installed"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_severity_a_sentence_and_a_runbook_that_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"].endswith((".", "B."))
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page.stem == rule["alert"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {rule['alert']}\n")
    for heading in ("Look at", "Do", "To see it"):
        assert f"\n## {heading}\n" in text
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / link).exists(), link


def test_no_runbook_is_left_over() -> None:
    assert {page.stem for page in (ROOT / "docs" / "runbooks").glob("Echo*.md")} == {rule["alert"] for rule in ALERTS}


def test_labels_in_a_sentence_are_those_that_the_expression_keeps() -> None:
    for rule in ALERTS:
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        labels = TARGET_LABELS.union(*(KNOWN[name] for name in metrics_of(rule["expr"])))
        assert named <= labels, rule["alert"]
        by = re.match(r"\s*(?:round\()?sum by \(([^)]*)\)", rule["expr"])
        if by is not None:
            assert named <= set(by.group(1).split(", ")), rule["alert"]


def test_files_are_written_that_prometheus_and_grafana_load(tmp_path: Path) -> None:
    written = render(tmp_path / "out", runs=[tmp_path / "a", tmp_path / "b"], runbooks="http://wiki.example/pages/")
    names = {str(path.relative_to(tmp_path / "out")) for path in written}
    assert {"alerts.yaml", "prometheus.yml", "grafana/dashboards/run.json"} < names
    rules = yaml.safe_load((tmp_path / "out" / "alerts.yaml").read_text())
    assert rules["groups"][1]["rules"][0]["annotations"]["runbook_url"] == "http://wiki.example/pages/EchoNoProgress.md"
    scrape = yaml.safe_load((tmp_path / "out" / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["file_sd_configs"][0]["files"] == [
        str(tmp_path / run / "processes" / "*.json") for run in ("a", "b")
    ]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard.name))
def test_a_dashboard_asks_only_for_the_run_that_was_chosen(dashboard: Any) -> None:
    made = json.loads(json.dumps(as_grafana(dashboard)))
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "namespace", "run"]
    assert {"icon", "targetBlank", "tooltip"} < set(made["links"][0]), "Grafana's schema (@grafana/schema, DashboardLink) demands them"
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    for panel in panels:
        for target in panel["targets"]:
            assert 'namespace="$namespace", run="$run"' in target["expr"]
            assert "$run}" not in target["expr"].replace('"$run"}', "")
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "runbooks").glob("*.md")), ids=lambda page: str(page.stem))
def test_a_runbook_names_settings_and_commands_that_there_are(page: Path) -> None:
    settings = {
        (section, key)
        for section, table in re.findall(r"^## \[+([\w.]+)\]+\n(.*?)(?=^## |\Z)", settings_page(), re.MULTILINE | re.DOTALL)
        for key in re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)
    }
    text = " ".join(page.read_text(encoding="utf-8").split())
    named = set(re.findall(r"`\[(\w+)\] (\w+)", text))
    assert named <= settings
    assert set(re.findall(r"`\[(\w+)\]", text)) <= {section for section, _ in settings}
    commands = vars(typer.main.get_command(app))["commands"]
    assert set(re.findall(r"`echoswarm ([\w-]+)", text)) <= set(commands)


def test_what_is_not_known_yet_is_not_zero() -> None:
    """A zero would ring EchoCheckpointDisk at each start, and EchoPoolTooSmall until steps were measured."""
    registry = LearnerMetrics().registry
    CoordinatorMetrics(registry)
    for name in ("echo_learner_checkpoint_free_bytes", "echo_streams_coordinator_feasible"):
        value = registry.get_sample_value(name)
        assert value is not None
        assert math.isnan(value), name
