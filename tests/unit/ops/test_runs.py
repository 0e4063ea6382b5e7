"""How a run stands, from what it says of itself and what was ordered."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_ops.cli.runs import _unpublished
from echo_ops.runs.deletion import Remains
from echo_ops.runs.listing import RunStatus, find_run, line_of
from echo_ops.supervisor.registration import folder_lock
from echo_runtime.announcement import Announcement
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, Progress, Run, RunControl, RunState
from echo_schemas.topics import PROGRESS, RUNS
from tests.examples import load_examples

NOW_MS = 1_000_000
RUN = next(record for record in load_examples(RUNS).values() if isinstance(record, Run))
SPOKE = cast("Progress", load_examples(PROGRESS)["progress.json"])


def run(steps: int = 10) -> Run:
    return replace(RUN, config=json.dumps({"learner": {"steps": steps}}))


def spoke(ago_ms: int, version: int = 3, held: str | None = None) -> Progress:
    return replace(SPOKE, version=version, published=0, held=held, time_ms=NOW_MS - ago_ms)


def told(state: RunState) -> Control:
    return Control(run_id=RUN.run_id, epoch=1, run=RunControl(state=state), issued_by="me", time_ms=1)


@pytest.mark.parametrize(
    ("progress", "order", "status"),
    [
        (spoke(500), None, RunStatus.TRAINING),
        (spoke(500), told(RunState.RUNNING), RunStatus.TRAINING),
        (spoke(500), told(RunState.PAUSED), RunStatus.PAUSED),
        (spoke(500), told(RunState.STOPPING), RunStatus.STOPPING),
        (spoke(60_000), told(RunState.STOPPING), RunStatus.STOPPED),
        (spoke(60_000), told(RunState.PAUSED), RunStatus.SILENT),
        (spoke(60_000), None, RunStatus.SILENT),
        (spoke(60_000, version=10), None, RunStatus.FINISHED),
        (spoke(60_000, version=10), told(RunState.STOPPING), RunStatus.FINISHED),
        (spoke(500, held="a quota"), None, RunStatus.THROTTLED),
        (spoke(60_000, held="a quota"), None, RunStatus.THROTTLED),
        (spoke(500, held="a quota"), told(RunState.PAUSED), RunStatus.PAUSED),
        (spoke(60_000, held="a quota"), told(RunState.STOPPING), RunStatus.STOPPED),
        (spoke(60_000, held="a quota", version=10), None, RunStatus.FINISHED),
        (spoke(700_000, held="a quota"), None, RunStatus.SILENT),
        (None, None, RunStatus.SILENT),
    ],
)
def test_how_a_run_stands(progress: Progress | None, order: Control | None, status: RunStatus) -> None:
    line = line_of(run(), progress, order, NOW_MS)
    assert line.status is status
    assert line.is_alive == (status not in {RunStatus.SILENT, RunStatus.STOPPED, RunStatus.FINISHED})


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"learner": {"steps": "many"}}'])
def test_a_configuration_of_another_release_has_no_known_end(config: str) -> None:
    assert line_of(replace(RUN, config=config), spoke(60_000, version=10), None, NOW_MS).status is RunStatus.SILENT


def test_a_name_that_there_is_not_is_refused_with_those_there_are() -> None:
    lines = [line_of(run(), None, None, NOW_MS)]
    assert find_run(lines, RUN.run_id, "echo.a") is lines[0]
    with pytest.raises(UserError, match="has no run 'nobody'") as caught:
        find_run(lines, "nobody", "echo.a")
    assert RUN.run_id in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("command", "order", "says"),
    [
        ("pause", None, "one that is started waits until `echoswarm runs resume"),
        ("stop", None, "none starts until `echoswarm runs resume"),
        ("resume", told(RunState.PAUSED), "start the run with the command"),
    ],
)
def test_an_order_to_a_run_without_a_learner_says_so(
    monkeypatch: pytest.MonkeyPatch, command: str, order: Control | None, says: str
) -> None:
    line, given = line_of(run(), spoke(60_000), order, NOW_MS), []
    monkeypatch.setattr("echo_ops.cli.runs.reach_bus", lambda *_, **__: SimpleNamespace(namespace=Namespace("echo.a")))
    monkeypatch.setattr("echo_ops.cli.runs.read_runs", lambda bus: [line])
    monkeypatch.setattr("echo_ops.cli.runs.give_order", lambda *_, **order: given.append(order))
    said = CliRunner().invoke(app, ["runs", command, RUN.run_id]).output
    assert "No learner of it runs now" in said
    assert says in said
    assert len(given) == 1


def test_a_run_that_is_told_to_stop_is_not_looked_for_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its processes that are alive are: they say farewell by themselves."""
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = {"learner": alive.getsockname()[1], "feeder": other.getsockname()[1]}
        other.close()
        for role, port in addresses.items():
            made = Announcement(target=f"127.0.0.1:{port}", namespace="echo.a", run=RUN.run_id, role=role, process=role, pid=7)
            made.write(tmp_path / "processes" / f"{role}.json")
        (tmp_path / "processes" / "half.json").write_text("[")
        monkeypatch.setattr("echo_ops.cli.runs.reach_bus", lambda *_, **__: SimpleNamespace(namespace=Namespace("echo.a")))
        monkeypatch.setattr("echo_ops.cli.runs.read_runs", lambda bus: [line_of(run(), spoke(60_000), told(RunState.STOPPING), NOW_MS)])
        monkeypatch.setenv("ECHO_CHECKPOINT__FOLDER", str(tmp_path))
        monkeypatch.setenv("ECHO_RUN__NAME", "another")
        other_run = CliRunner().invoke(app, ["runs", "stop", RUN.run_id]).output
        monkeypatch.setenv("ECHO_RUN__NAME", RUN.run_id)
        said = CliRunner().invoke(app, ["runs", "stop", RUN.run_id]).output
    assert "farewell" not in other_run
    assert "feeder had ended without a farewell" in said
    assert sorted(path.stem for path in (tmp_path / "processes").iterdir()) == ["half", "learner"]


def test_an_archive_says_which_steps_only_the_checkpoints_have() -> None:
    line = line_of(run(), spoke(60_000), None, NOW_MS)
    assert line.progress is not None
    all_out = replace(line, progress=replace(line.progress, version=53, published=53))
    assert _unpublished(all_out) == []
    (said,) = _unpublished(replace(line, progress=replace(line.progress, version=53, published=52)))
    assert "the steps after version 52, of 53" in said


def test_a_removal_says_what_becomes_of_the_logins_and_asks_for_the_runs_own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry: Any = object()
    remains = Remains(run_id=RUN.run_id, topics=("echo.a.runs",), keys={}, groups=(), acls=(entry,), paths=(), num_bytes=0)
    removed: list[Remains] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echo_ops.cli.runs.reach_bus", lambda *_, **__: SimpleNamespace(namespace=Namespace("echo.a")))
    monkeypatch.setattr("echo_ops.cli.runs.read_runs", lambda bus: [line_of(run(), spoke(60_000), None, NOW_MS)])
    monkeypatch.setattr("echo_ops.cli.runs.find_remains", lambda *_, **__: remains)
    monkeypatch.setattr("echo_ops.cli.runs.remove", lambda bus, found: removed.append(found))
    monkeypatch.setenv("ECHO_RUN__NAME", RUN.run_id)
    said = CliRunner().invoke(app, ["runs", "delete", RUN.run_id]).output
    assert "1 entries of access lists below echo.a, so its logins may do nothing more" in said
    assert "echoswarm kafka up --secure" in said
    monkeypatch.setenv("ECHO_CHECKPOINT__FOLDER", str(tmp_path))
    with folder_lock(tmp_path):
        assert "A run is going on in" in CliRunner().invoke(app, ["runs", "delete", RUN.run_id, "--yes"]).output
    assert not removed
    assert CliRunner().invoke(app, ["runs", "delete", RUN.run_id, "--yes"]).exit_code == 0
    assert removed == [remains]
    monkeypatch.setenv("ECHO_RUN__NAME", "another")
    refused = CliRunner().invoke(app, ["runs", "delete", RUN.run_id, "--yes"])
    assert (refused.exit_code, f"a demo's is runs/{RUN.run_id}/run.toml" in refused.output) == (2, True)
    assert len(removed) == 1


@pytest.mark.parametrize("command", ["delete", "archive"])
def test_what_must_come_first_is_a_command_with_the_same_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    file = tmp_path / "a run.toml"
    file.write_text(f'[run]\nname = "{RUN.run_id}"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echo_ops.cli.runs.reach_bus", lambda *_, **__: SimpleNamespace(namespace=Namespace("echo.a")))
    monkeypatch.setattr("echo_ops.cli.runs.read_runs", lambda bus: [line_of(run(), spoke(500), None, NOW_MS)])
    into = ["--to", str(tmp_path)] if command == "archive" else []
    refused = CliRunner().invoke(app, ["runs", command, RUN.run_id, "--config", file.name, *into])
    assert refused.exit_code == 2
    assert f"echoswarm runs stop {RUN.run_id} --config '{file.name}'" in " ".join(refused.output.split())
