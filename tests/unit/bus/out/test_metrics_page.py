"""The operator's page lists every metric as the code has it."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from echo_bus.metrics import BusMetrics

PAGE = (Path(__file__).parents[4] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_metric_stands_on_the_page_with_its_meaning() -> None:
    collectors = [value for value in vars(BusMetrics()).values() if isinstance(value, MetricWrapperBase)]
    assert collectors
    for collector in collectors:
        (family,) = collector.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"| `{name}` | {family.type} |" in PAGE, name
        assert family.documentation in PAGE, name
