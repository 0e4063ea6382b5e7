"""The made-up runs of `echoswarm view --demo`, and through them the pages that need workers, rewards, forks and questions."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="audits import the learner's types: install the extra 'learner'")
pytest.importorskip("pyspiel", reason="hands are played by OpenSpiel: install the extra 'tasks'")

from echo_bus.clock import SystemClock
from echo_ops.cli.main import app
from echo_ops.viewer.demo.episodes import Words, sokoban_player
from echo_ops.viewer.demo.in_memory import DEMO_RUN, bus_in_memory, make_demo
from echo_ops.viewer.demo.made_run import MadePlan, MadeRun, StoryClock
from echo_ops.viewer.server import ViewerServer
from echo_ops.viewer.source import Source
from echo_replay.audit import audit_run
from echo_replay.history import History
from echo_replay.verdicts import Promise, Verdict
from echo_schemas.records import Control, Coordinates, Reward, RewardControl, RewardOutcome, RewardTerm
from echo_schemas.topics import REWARDS
from tests.unit.replay.browser import find_browser, opened

pytestmark = pytest.mark.slow

WAIT_S = 30.0
STEPS = 24


@dataclass
class Demo:
    """The viewer of the demo's first run."""

    source: Source
    server: ViewerServer

    def get(self, path: str, **query: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.address[1], timeout=WAIT_S)
        try:
            connection.request("GET", f"/api/{path}?{urlencode(query, doseq=True, quote_via=quote)}")
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def page(self, path: str, **query: Any) -> Any:
        status, page = self.get(path, **query)
        assert status == 200, page
        return page


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    bus, pieces = make_demo()
    history = History(bus, DEMO_RUN)
    with Source(history.bus, history, pieces=pieces) as source, ViewerServer(source) as server:
        source.refresh()
        yield Demo(source, server)


def test_its_log_keeps_what_a_log_promises(demo: Demo) -> None:
    report = audit_run(demo.source.books().bus, DEMO_RUN)
    broken = {finding.promise for finding in report.findings if finding.verdict is Verdict.BROKEN}
    # There are no weights.
    assert broken <= {Promise.CURRENT}, report


def test_rewards_rise_and_boards_are_drawn(demo: Demo) -> None:
    means = demo.page("metrics")["curves"]["reward: return"]["mean"]
    assert len(means) == STEPS
    assert sum(means[-6:]) > sum(means[:6])
    seq = demo.page(f"step/{STEPS}")["groups"][0]["seq"]
    samples = demo.page(f"group/{seq}")["samples"]
    page = demo.page(f"trajectory/{samples[0]['partition']}:{samples[0]['offset']}")
    assert "P" in page["frames"][0]["board"] or "S" in page["frames"][0]["board"]
    assert "".join(page["tokens"]["texts"]).startswith("You are solving a Sokoban puzzle.")
    assert page["learner"]["logprob_diff_mean"] > 0


def test_the_timeline_has_a_lane_for_each_worker_and_the_time_that_rewards_took(demo: Demo) -> None:
    page = demo.page("timeline", step=10, seconds=30)
    assert {lane["worker"] for lane in page["lanes"]} == {"gpu-0", "cpu-0", "cpu-1"}
    assert 10 in [each["version"] for each in page["steps"]]
    assert any(each["version"] == 10 for each in page["broadcasts"])
    assert {each["name"] for each in page["lags"]} >= {"return"}
    for lane in page["lanes"]:
        assert all(span["end_ms"] >= page["since_ms"] and span["start_ms"] <= page["until_ms"] for span in lane["spans"])
        assert all(one["end_ms"] <= two["start_ms"] for one, two in zip(lane["spans"], lane["spans"][1:], strict=False))
    assert demo.page("timeline", until=1)["lanes"] == []
    assert demo.get("timeline", step=900)[0] == 404


def test_of_a_long_stretch_some_groups_are_drawn_whole_and_the_page_says_so(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_ops.viewer.timeline._MOST_RECORDS", 10_000)
    whole = demo.page("timeline", seconds=3_600)
    spans = {span["group"]: span["num_samples"] for lane in whole["lanes"] for span in lane["spans"]}
    assert not whole["is_cut"]
    assert set(spans.values()) == {4}
    monkeypatch.setattr("echo_ops.viewer.timeline._MOST_RECORDS", sum(spans.values()) - 1)
    page = demo.page("timeline", seconds=3_600)
    some = {span["group"]: span["num_samples"] for lane in page["lanes"] for span in lane["spans"]}
    assert page["is_cut"]
    assert 0 < len(some) < len(spans)
    assert set(some.values()) == {4}
    monkeypatch.setattr("echo_ops.viewer.timeline._MOST_RECORDS", 100)
    newest = demo.page("timeline", seconds=3_600)
    assert 0 < sum(span["num_samples"] for lane in newest["lanes"] for span in lane["spans"]) <= 100


def test_the_pool_says_what_workers_are_and_why_one_was_released(demo: Demo) -> None:
    page = demo.page("pool")
    kinds = {each["worker_id"]: (each["kind"], each["price_per_hour"], each["state"]) for each in page["workers"]}
    assert kinds["gpu-0"] == ("large", 2.4, "gone")
    assert sum(each["trained"] for each in page["workers"]) == STEPS * 48
    paid = sum(each["cost"] for each in page["costs"])
    assert paid == pytest.approx(demo.page("overview")["cost"]) == pytest.approx(STEPS * 8 / 3600 * (2.4 + 0.3 + 0.3 + 3.0))
    order = page["orders"][0]
    assert (order["worker"], order["is_active"]) == ("cpu-1", False)
    assert "are enough for" in order["reason"]


def test_rewards_have_their_shadows_beside_them(demo: Demo) -> None:
    page = demo.page("rewards")
    lines = {each["name"]: each for each in page["lines"]}
    assert (lines["return"]["weight"], lines["my_rewards.py:brevity"]["weight"]) == (1.0, 0.0)
    coverage = {each["name"]: each["coverage"] for each in page["values"]}
    assert coverage["return"] == 1.0
    assert 0.3 < coverage["my_rewards.py:brevity"] < 0.7
    found = page["comparison"]
    assert (found["a"], found["b"]) == ("return", "my_rewards.py:brevity")
    assert sum(map(sum, found["square"]["counts"])) == found["num_matched"] > 0
    assert demo.page("rewards", a="return", b="return")["comparison"]["flipped"] == 0
    assert demo.page("rewards", a="return", b="nobody")["comparison"] is None


def test_an_order_about_weights_is_shown_until_it_is_in_force(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def ordered(version: int) -> Any:
        weights = RewardControl(from_version=version, terms=(RewardTerm(name="return", weight=2.0),))
        order = Control(run_id=DEMO_RUN, epoch=1, rewards=weights, issued_by="test", time_ms=1)
        monkeypatch.setattr(demo.source._orders, "items", lambda: {f"{DEMO_RUN}/rewards": order})
        return demo.page("rewards")

    later = ordered(STEPS + 2)
    assert later["ordered"]["from_version"] == STEPS + 2
    assert {each["name"]: each["weight"] for each in later["terms"]}["return"] == 1.0
    now = ordered(STEPS + 1)
    assert now["ordered"] is None
    assert now["terms"] == [{"name": "return", "weight": 2.0}]


def test_a_reward_that_came_long_afterwards_is_looked_for_if_asked_for(demo: Demo) -> None:
    seq = demo.page("step/1")["groups"][0]["seq"]
    sample = demo.page(f"group/{seq}")["samples"][0]
    assert set(sample["rewards"]) == {"return"}
    bus = demo.source.books().bus
    reward = Reward(
        run_id=DEMO_RUN, group_id=f"{DEMO_RUN}/{seq}", seq=seq, attempt=sample["attempt"], index=sample["index"], name="late", value=1.0,
        of=Coordinates(partition=sample["partition"], offset=sample["offset"]), code_version="1", outcome=RewardOutcome.SCORED,
        time_ms=bus.clock.time_ms(),
    )  # fmt: skip
    publisher = bus.publisher()
    publisher.publish(REWARDS, reward, partition=sample["partition"])
    publisher.close(WAIT_S)
    assert set(demo.page(f"group/{seq}")["samples"][0]["rewards"]) == {"return"}
    assert set(demo.page(f"group/{seq}", late=1)["samples"][0]["rewards"]) == {"return", "late"}


def test_a_fork_lies_over_the_run_that_it_came_from(demo: Demo) -> None:
    page = demo.page("metrics", run="sokoban-fork")
    assert page["others"]["sokoban-fork"]["versions"] == list(range(13, 25))
    assert {"run": "sokoban-fork", "parent_run": DEMO_RUN, "parent_version": 12} in page["runs"]
    status, body = demo.get("metrics", run="nobody")
    assert (status, "no run 'nobody'" in body["error"]) == (404, True)


def test_drops_are_counted_by_who_sampled_them(demo: Demo) -> None:
    page = demo.page("dropped")
    assert page["reasons"] == {"stale": len(page["drops"])}
    sampled = page["drops"][0]["sampled_by"]
    lineage = demo.page(f"lineage/{sampled}")
    assert lineage["dropped"]["stale"] == sum(each["sampled_by"] == sampled and each["offset"] is not None for each in page["drops"])


def test_a_question_is_answered_and_one_that_writes_or_does_not_end_is_not(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb", reason="questions are answered by DuckDB: install the extra 'analysis'")
    page = demo.page("sql", question="select fate, count(*) as n from trajectories group by fate order by n desc", step="1..3")
    assert page["columns"] == ["fate", "n"]
    assert page["rows"] == [["trained", 3 * 48]]
    assert demo.page("sql", question="select tokens from trajectories limit 1", step="1")["rows"][0][0].startswith("[")
    monkeypatch.setattr("echo_ops.viewer.questions._MOST_MB", 32)
    much = "select count(distinct i) from range(20000000) t(i)"
    assert "does not fit into memory" in demo.get("sql", question=much, step="1")[1]["error"]
    monkeypatch.setattr("echo_ops.viewer.questions._MOST_MB", 1_024)
    for question, says in (
        ("create table x as select 1", "may only read"),
        ("select 1; select 2", "one is answered"),
        ("select * from read_csv('/etc/passwd')", "names a file"),
        ("select nothing from trajectories", "nothing"),
        ("", "no question"),
    ):
        status, body = demo.get("sql", question=question, step="1")
        assert (status, says in body["error"]) == (400, True), body
    monkeypatch.setattr("echo_ops.viewer.questions._TIMEOUT_S", 0.5)
    endless = "select sum(a.i * b.i) from range(10000000) a(i), range(10000000) b(i)"
    assert "not answered within 0.5 s" in demo.get("sql", question=endless, step="1")[1]["error"]
    monkeypatch.setattr("echo_ops.viewer.questions._READING_S", 0.0)
    assert "took too long" in demo.get("sql", question="select 1", step="1")[1]["error"]
    monkeypatch.setattr("echo_ops.viewer.questions._MOST_TRAJECTORIES", 10)
    assert "more than 10 trajectories" in demo.get("sql", question="select 1", step="1")[1]["error"]


def test_every_example_of_a_question_is_answered_whatever_the_rewards_are_called(demo: Demo) -> None:
    pytest.importorskip("duckdb", reason="questions are answered by DuckDB: install the extra 'analysis'")
    script = resources.files("echo_ops.viewer").joinpath("static/search.js").read_text(encoding="utf-8")
    examples = re.findall(r'\["([^"]+)", "((?:select|describe) [^"]+)"\]', script)
    assert len(examples) == script.partition("const QUESTIONS")[2].partition("];")[0].count("\n  [")
    for label, question in examples:
        assert demo.page("sql", question=question, step="1..20")["rows"], label
        assert "reward_" not in question, label


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--run", "nobody"], "The demo has no run 'nobody'"),
        (["--draw", "mine"], "names no task and function"),
        (["--draw", "mine=none.py:frames"], "There is no Python file none.py"),
        (["sokoban"], "sokoban and --demo contradict each other"),
    ],
)
def test_a_wrong_option_is_a_sentence(options: list[str], says: str) -> None:
    found = CliRunner().invoke(app, ["view", "--demo", *options])
    assert found.exit_code == 2
    assert says in " ".join(found.output.split())


def test_a_folder_that_is_not_there_is_no_run() -> None:
    found = CliRunner().invoke(app, ["view", "out/run=demo"])
    assert found.exit_code == 2
    assert "There is no folder out/run=demo." in found.output


def test_the_command_serves_the_demo_until_it_is_ended(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "echo_ops.viewer.demo.in_memory.make_demo", lambda: (demo.source.books().bus, lambda ids: [str(each) for each in ids])
    )
    monkeypatch.setattr("echo_ops.cli.view._until_ended", lambda: None)
    found = CliRunner().invoke(app, ["view", "--demo", "--run", "sokoban-fork"])
    assert found.exit_code == 0
    assert "sokoban-fork is shown at http://127.0.0.1:" in found.output


@pytest.mark.slow
def test_a_run_that_has_only_begun_says_so_on_every_page(tmp_path: Path) -> None:
    clock = StoryClock(SystemClock().time_ms())
    bus = bus_in_memory(clock, "new")
    MadeRun(bus, clock, MadePlan(steps=(0, 0)), sokoban_player()[1], Words()).write()
    history = History(bus, "new")
    with Source(history.bus, history) as source, ViewerServer(source) as server:
        source.refresh()
        begun = Demo(source, server)
        for path in ("overview", "metrics", "steps", "timeline", "rewards", "pool", "lineage/0", "dropped", "search"):
            begun.page(path)
        if (browser := find_browser()) is None:
            pytest.skip("no Chromium on this machine; ECHO_CHROMIUM names one")
        with opened(browser, tmp_path / "profile") as page:
            page.open(server.url)
            for key, says in {
                "o": "No step has been trained yet",
                "m": "No step has been trained yet",
                "s": "No step has been trained yet",
                "t": "No step has been trained yet",
                "r": "no process",
                "d": "Nothing was dropped",
                "l": "the run began with it",
            }.items():
                page.wait_for("!document.querySelector('main').classList.contains('waiting') && document.title !== 'EchoSwarm'")
                page.press(key)
                page.wait_for(f"document.body.innerText.includes({json.dumps(says)})")


@pytest.mark.slow
def test_in_a_browser_every_page_says_something_at_both_widths(demo: Demo, tmp_path: Path) -> None:
    if (browser := find_browser()) is None:
        pytest.skip("no Chromium on this machine; ECHO_CHROMIUM names one")
    pages = {
        "o": ("Newest steps", "svg.curve"),
        "m": ("All numbers of a step", "svg.curve circle"),
        "s": ("v24", "tbody tr"),
        "t": ("seconds until a reward came", "svg.timeline rect.span"),
        "r": ("advantages that change their sign", ".square span"),
        "p": ("are enough for", "tbody tr"),
        "l": ("What became of its samples", ".bar"),
        "d": ("By length", ".bar"),
        "/": ("One range", "form"),
        "q": ("One SELECT", "textarea"),
    }
    with opened(browser, tmp_path / "profile") as page:
        page.open(demo.server.url)
        page.wait_for("document.querySelector('svg.curve') !== null")
        for width in (1_280, 390):
            page.resize(width)
            for key, (says, holds) in pages.items():
                page.press(key)
                page.wait_for(f"document.body.innerText.includes({json.dumps(says)}) && document.querySelector('{holds}') !== null")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{key} is wider than {width} pixels"
                page.evaluate("document.activeElement.blur()")


@pytest.mark.slow
def test_in_a_browser_keys_move_through_time_and_versions_and_a_span_opens_its_group(demo: Demo, tmp_path: Path) -> None:
    if (browser := find_browser()) is None:
        pytest.skip("no Chromium on this machine; ECHO_CHROMIUM names one")
    with opened(browser, tmp_path / "profile") as page:
        page.open(f"{demo.server.url}#/lineage/7")
        page.wait_for("document.title.startsWith('Lineage v7 ')")
        page.press("ArrowLeft")
        page.wait_for("document.title.startsWith('Lineage v6 ')")
        page.evaluate("location.hash = '#/timeline?step=10&seconds=15'")
        page.wait_for("document.querySelector('svg.timeline') !== null")
        before = page.evaluate("document.querySelector('main .card p').textContent")
        page.press("ArrowRight")
        page.wait_for(f"document.querySelector('main .card p').textContent !== {json.dumps(before)}")
        page.evaluate("document.querySelector('svg.timeline rect.span.trained').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
        page.wait_for("document.title.startsWith('Group ')")
        page.evaluate("location.hash = '#/sql?question=select+1+as+one&step=1'")
        page.wait_for("document.body.innerText.includes('1 row.')")
        page.evaluate("location.hash = '#/sql?question=drop+table+steps&step=1'")
        page.wait_for("document.body.innerText.includes('may only read')")
        page.evaluate("location.hash = '#/metrics?run=sokoban-fork'")
        page.wait_for("document.querySelectorAll('figcaption .key').length === 2")
