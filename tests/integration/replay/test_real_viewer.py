"""The viewer over a real Kafka: every page, its rewards and its timeline among them, and a step that comes while somebody looks; and the
same pages of an export of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("duckdb", reason="install the extra 'analysis'")

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline, SystemClock
from echo_ops.viewer.demo.episodes import Words, sokoban_player
from echo_ops.viewer.demo.made_run import MadePlan, MadeRun, StoryClock
from echo_ops.viewer.routes import answer
from echo_ops.viewer.source import Source
from echo_ops.viewer.windows import Json
from echo_replay.export.exported_log import bus_of
from echo_replay.export.exporter import export_run
from echo_replay.export.manifest import open_export
from echo_replay.history import History
from echo_schemas.naming import Namespace
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.exported_pages import assert_pages_alike

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
RUN = "looked-at"
WAIT_S = 60.0


@contextmanager
def viewer(bus: Bus, words: Words) -> Iterator[Source]:
    history = History(bus, RUN)
    with Source(history.bus, history, pieces=words.pieces) as source:
        yield source


def write(bus: Bus, first: int, last: int, words: Words) -> None:
    """Steps (first, last], each half a second long, so that what records say of their time is near what the log says."""
    clock, (options, play) = StoryClock(SystemClock().time_ms()), sokoban_player()
    plan = MadePlan(steps=(first, last), groups_per_step=3, step_s=0.5, options=options)
    MadeRun(replace(bus, run_id=RUN), clock, plan, play, words).write()


def test_every_page_of_a_run_that_goes_on(kafka_bootstrap: str, namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster = KafkaCluster(kafka_bootstrap)
    Pipeline(tmp_path_factory.mktemp("run"), cluster=cluster, namespace=namespace)  # type: ignore[arg-type]  # makes the topics
    bus = Bus(cluster=cluster, namespace=namespace, role="operator")
    words = Words()
    write(bus, 0, 4, words)
    with viewer(bus, words) as source:

        def ask(path: str, **query: str) -> Json:
            return answer(source, f"/api/{path}", {name: [value] for name, value in query.items()})

        assert ask("overview")["version"] == 4
        seq = ask("step/4")["groups"][0]["seq"]
        samples = ask(f"group/{seq}")["samples"]
        assert all("return" in each["rewards"] for each in samples)
        page = ask(f"trajectory/{samples[0]['partition']}:{samples[0]['offset']}")
        assert page["rewards"] == samples[0]["rewards"]
        assert len(page["frames"]) > 1
        timeline = ask("timeline", seconds="60")
        assert {lane["worker"] for lane in timeline["lanes"]} == {"gpu-0", "cpu-0", "cpu-1"}
        assert {each["name"] for each in timeline["lags"]} == {"return", "my_rewards.py:brevity"}
        assert {each["name"] for each in ask("rewards")["lines"]} == {"return", "my_rewards.py:brevity"}
        assert ask("pool")["orders"][0]["reason"].startswith("release cpu-1")
        assert ask("lineage/3")["step"]["num_samples"] == 12
        assert ask("sql", question="select count(*) as n from trajectories", step="2..3")["rows"] == [[24]]
        write(bus, 4, 5, words)
        deadline = Deadline.after(WAIT_S)
        while ask("overview")["version"] != 5:
            assert not deadline.expired(), "waited for the step that came meanwhile"
            source.refresh()
        assert ask("lineage/4")["trained"] == [{"step": 5, "count": 12}]
    # What an export of it shows is the same.
    folder = tmp_path_factory.mktemp("export")
    export_run(bus, RUN, folder)
    assert_pages_alike(replace(bus, run_id=RUN), bus_of(*open_export(folder)), RUN, words.pieces)
