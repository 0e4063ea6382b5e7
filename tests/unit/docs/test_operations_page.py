"""The operator's page names exactly the metrics that the roles register, and every reason that they count by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from echo_bus.client.profiles import BROKER_FAILOVER, FAILOVER
from echo_bus.clock import SystemClock
from echo_bus.metrics import BusMetrics
from echo_core.bottleneck import Bottleneck, Place, describe
from echo_learner.metrics import LearnerMetrics
from echo_rollout.metrics import FeederMetrics, OfflineMetrics, WorkerMetrics
from echo_rollout.publishing import GroupEnd, GroupFailure
from echo_rollout.weights.watcher import InstallOutcome
from echo_runtime.places import PlaceTimes
from echo_schemas.records import DropReason
from echo_streams.metrics import CoordinatorMetrics, StreamsMetrics

PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
CLASSES = {
    "All roles: the bus": BusMetrics,
    "Feeder": FeederMetrics,
    "Offline producer": OfflineMetrics,
    "Workers": WorkerMetrics,
    "Reward processes": StreamsMetrics,
    "Coordinator": CoordinatorMetrics,
    "Learner": LearnerMetrics,
}


def _section(title: str) -> str:
    """The text below a heading, up to the next heading."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"there is no section {title!r}"
    return match.group(1)


def _rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    return [line.strip("| ").split(" | ") for line in _section(title).splitlines() if line.startswith("|")][2:]


def _registered(metrics: object) -> list[tuple[str, str, str, str]]:
    """Name as Prometheus shows it, type, labels and meaning of each collector, in the order of the class."""
    found = []
    for collector in vars(metrics).values():
        if isinstance(collector, MetricWrapperBase):
            (family,) = collector.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.append((f"`{name}`", family.type, ", ".join(collector._labelnames) or "–", family.documentation))
    return found


@pytest.mark.parametrize("title", CLASSES)
def test_each_table_is_what_the_class_registers_and_says_what_to_alert_on(title: str) -> None:
    registered = _registered(CLASSES[title](CollectorRegistry()))
    assert registered
    rows = _rows(title)
    assert [tuple(row[:4]) for row in rows] == registered
    assert all(len(row) == 5 and row[4] for row in rows)


def test_the_settings_of_a_quick_fail_over_are_those_in_force() -> None:
    rows = {row[0].strip("`"): row[1] for row in _rows("Fail-over") if row[0].startswith("`")}
    assert rows == {name: str(value) for name, value in {**BROKER_FAILOVER, **FAILOVER}.items()}


def test_no_metric_is_named_that_does_not_exist() -> None:
    registry = CollectorRegistry()
    for metrics in CLASSES.values():
        metrics(registry)
    PlaceTimes(registry, SystemClock())
    known = {name for family in registry.collect() for name in (family.name, f"{family.name}_total")}
    named = set(re.findall(r"\becho_(?:bus|rollout|streams|learner|place)_\w+", PAGE))
    assert named - known == set()


def test_every_place_stands_in_the_table_in_the_order_of_the_pipeline_but_for_the_way_back() -> None:
    assert [row[0].strip("`") for row in _rows("Places: where the time goes")][: len(Place)] == [place.value for place in Place]


def test_the_sentence_that_is_shown_is_one_that_is_made() -> None:
    assert describe(Bottleneck(place=Place.TRAIN, busy_share=0.95, learner_waits=0.05)) in PAGE


@pytest.mark.parametrize(
    ("title", "reasons"),
    [
        ("Why something is dropped", DropReason),
        ("Why a group fails", GroupFailure),
        ("Why weights are not installed", InstallOutcome),
    ],
)
def test_every_reason_stands_in_its_table(title: str, reasons: type[DropReason] | type[GroupFailure] | type[InstallOutcome]) -> None:
    named = [name for row in _rows(title) for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(reason.value for reason in reasons)


def test_every_outcome_of_a_group_is_explained() -> None:
    text = _section("Why a group fails")
    assert all(f"`{outcome.value}`" in text for outcome in GroupEnd)
