"""The observer's looks at the roles: one that ends in the middle of its answer is no error, and no error of its own ends the watching."""

from __future__ import annotations

import json
import threading
import urllib.request
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.clock import ManualClock
from echo_memory import MemoryCluster
from echo_ops.report import observer
from echo_ops.report.observer import Observer, scrape_places
from echo_ops.report.offsets import OffsetWatch
from echo_ops.report.run_view import RunView
from echo_runtime.announcement import Announcement, read_announcement
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop, DropReason
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import DROPS

WAIT_S = 30.0


def test_a_role_that_dies_in_the_middle_of_its_answer_has_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        raise IncompleteRead(b"echo_place_sec", 4000)

    monkeypatch.setattr(urllib.request, "urlopen", dies)
    assert scrape_places("http://127.0.0.1:9") is None


def test_an_announcement_that_is_not_whole_is_none_yet(tmp_path: Path) -> None:
    path = tmp_path / "learner.json"
    assert read_announcement(path) is None
    for content in ('[{"targets": ["127.', "{}", "[]", '[{"targets": [], "labels": {}}]', '[{"targets": ["127.0.0.1:9"], "labels": {}}]'):
        path.write_text(content)
        assert read_announcement(path) is None


def test_a_process_is_announced_as_a_target_of_prometheus(tmp_path: Path) -> None:
    announced = Announcement(target="127.0.0.1:9", namespace="echo.a", run="r", role="worker", process="worker.w1", pid=7)
    announced.write(tmp_path / "processes" / "w1.json")
    assert read_announcement(tmp_path / "processes" / "w1.json") == announced
    (target,) = json.loads((tmp_path / "processes" / "w1.json").read_text())
    assert target["targets"] == ["127.0.0.1:9"]
    assert {name for name in target["labels"] if not name.startswith("__meta_")} == {"namespace", "run", "role", "process"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bus(clock: ManualClock) -> Bus:
    """With all topics, of one partition each."""
    cluster, space = MemoryCluster(clock=clock), Namespace("unit.observer")
    topics = [NewTopic(f"{space.name}.{spec.name}", 1, 1) for spec in load_topic_specs()]
    for future in cluster.admin().create_topics(topics).values():
        future.result(WAIT_S)
    return Bus(cluster=cluster, namespace=space, clock=clock, role="view", run_id="r")


def test_what_was_dropped_long_before_the_command_is_not_read(bus: Bus, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffsetWatch, "lags", lambda watch, shadows: {})
    publisher = bus.publisher()
    for hour in range(3):
        drop = Drop(run_id="r", group_id=f"r/{hour}", seq=hour, why=DropReason.STALE, learner_version=1, time_ms=clock.time_ms())
        publisher.publish(DROPS, drop).wait(WAIT_S)
        clock.advance(3 * 3600)
    started_ms = clock.time_ms()
    drop = Drop(run_id="r", group_id="r/9", seq=9, why=DropReason.STALE, learner_version=1, time_ms=started_ms)
    publisher.publish(DROPS, drop).wait(WAIT_S)
    watching = Observer(RunView("r", started_ms=started_ms, steps_wanted=1, budget=1), {}, lambda: 1.0)
    watching.start(bus)
    watching.finish()
    with watching.view() as view:
        assert view.drops == {"stale": 1}
    assert bus.metrics.records_read.labels(bus.namespace.topic(DROPS))._value.get() == 1


def test_whatever_a_look_at_the_roles_raises_the_watching_goes_on(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffsetWatch, "lags", lambda watch, shadows: {})
    monkeypatch.setattr(observer, "_EVERY_S", 0.0)
    again = threading.Event()
    looks: list[str] = []

    def scrape(url: str) -> None:
        looks.append(url)
        if len(looks) > 1:
            again.set()
        raise RuntimeError(url)

    announced = Announcement(target="127.0.0.1:9", namespace="echo.a", run="r", role="learner", process="learner", pid=7)
    announced.write(tmp_path / "learner.json")
    monkeypatch.setattr(observer, "scrape_places", scrape)
    watching = Observer(RunView("r", started_ms=0, steps_wanted=1, budget=1), {"learner": tmp_path / "learner.json"}, lambda: 1.0)
    watching.start(bus)
    assert again.wait(WAIT_S), "waited for a second look"
    watching.finish()
