"""The observer's looks at the roles: one that ends in the middle of its answer is no error, and no error of its own ends the watching."""

from __future__ import annotations

import threading
import urllib.request
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.memory import MemoryCluster
from echo_bus.metrics import BusMetrics
from echo_ops.report import observer
from echo_ops.report.observer import Observer
from echo_ops.report.offsets import OffsetWatch
from echo_ops.report.run_view import RunView
from echo_ops.report.scrape import announced_url, scrape_places
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs

WAIT_S = 30.0


def test_a_role_that_dies_in_the_middle_of_its_answer_has_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        raise IncompleteRead(b"echo_place_sec", 4000)

    monkeypatch.setattr(urllib.request, "urlopen", dies)
    assert scrape_places("http://127.0.0.1:9") is None


def test_an_announcement_that_is_not_whole_is_none_yet(tmp_path: Path) -> None:
    (tmp_path / "learner.json").write_text('{"metrics": "ht')
    assert announced_url(tmp_path / "learner.json") is None


def test_whatever_a_look_at_the_roles_raises_the_watching_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, space = MemoryCluster(), Namespace("unit.observer")
    topics = [NewTopic(f"{space.name}.{spec.name}", 1, 1) for spec in load_topic_specs()]
    for future in cluster.admin().create_topics(topics).values():
        future.result(WAIT_S)
    bus = Bus(cluster=cluster, namespace=space, codec=lock_file_codec(), metrics=BusMetrics(), clock=SystemClock(), role="view", run_id="r")
    monkeypatch.setattr(OffsetWatch, "lags", lambda watch: {})
    monkeypatch.setattr(observer, "_EVERY_S", 0.0)
    again = threading.Event()
    looks: list[str] = []

    def scrape(url: str) -> None:
        looks.append(url)
        if len(looks) > 1:
            again.set()
        raise RuntimeError(url)

    (tmp_path / "learner.json").write_text('{"metrics": "http://127.0.0.1:9"}')
    monkeypatch.setattr(observer, "scrape_places", scrape)
    watching = Observer(RunView("r", started_ms=0, steps_wanted=1, budget=1), {"learner": tmp_path / "learner.json"}, lambda: 1.0)
    watching.start(bus)
    assert again.wait(WAIT_S), "waited for a second look"
    watching.finish()
