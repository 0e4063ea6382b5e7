"""An export read as if it were the log: the same history, the same pages and the same answers of the commands; or one clear sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("pyarrow", reason="exports are Parquet: install the extra 'analysis'")

from typer.testing import CliRunner

from echo_bus.bus import Bus
from echo_ops.cli.main import app
from echo_ops.viewer.demo.in_memory import make_demo
from echo_replay.export.exported_log import bus_of
from echo_replay.export.exporter import export_run
from echo_replay.export.layout import Table
from echo_replay.export.manifest import NAME, open_export
from echo_replay.export.verifying import verify_export
from echo_replay.history import History, HistoryRecord
from echo_replay.selection import Groups, Offsets, Selection, Steps, Times, Versions
from echo_schemas.errors import UserError
from tests.unit.replay.exported_pages import assert_pages_alike
from tests.unit.replay.forged import SoundRun

DEMO = "demo"
# Small strides, so that a partition has several files.
STRIDE = 7


@pytest.fixture(scope="module")
def folder(sound: SoundRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_run(sound.pipeline.bus, DEMO, folder, stride=STRIDE)
    return folder


@pytest.fixture
def exported(folder: Path) -> Bus:
    return bus_of(*open_export(folder))


def records(bus: Bus, selection: Selection, *, by_time: bool = False) -> list[HistoryRecord]:
    """All but the message itself: its bytes are those of this release."""
    with History(bus, DEMO) as history:
        found = [
            replace(each, raw=each.raw.key(), rewards=dict(each.rewards))  # type: ignore[arg-type]  # only to compare
            for each in history.read(selection, by_time=by_time)
        ]
        assert not history.missing
    return found


def test_the_history_of_an_export_is_that_of_the_log(sound: SoundRun, exported: Bus) -> None:
    log = sound.pipeline.bus
    whole = records(log, Selection())
    assert records(exported, Selection()) == whole
    assert len({each.fate for each in whole}) > 3, "trained, dropped, dead and open ones are among them"
    times = sorted(each.time_ms for each in whole)
    for where in (
        Steps(2, 3),
        Versions(1, 2),
        Groups(frozenset({f"{DEMO}/3", f"{DEMO}/1"})),
        Offsets({0: (3, 20), 1: (8, 8)}),
        Times(times[len(times) // 3], times[len(times) // 2]),
    ):
        assert records(exported, Selection(range=where)) == records(log, Selection(range=where)) != []
    assert records(exported, Selection(), by_time=True) == records(log, Selection(), by_time=True)


def test_the_books_of_an_export_are_those_of_the_log(sound: SoundRun, exported: Bus) -> None:
    with History(sound.pipeline.bus, DEMO) as log, History(exported, DEMO) as history:
        assert [each.report for each in history.log.steps] == [each.report for each in log.log.steps]
        assert [(each.offset, each.seqs.tolist(), each.tokens) for each in history.log.steps] == [
            (each.offset, each.seqs.tolist(), each.tokens) for each in log.log.steps
        ]
        assert history.log.manifests == log.log.manifests
        assert (history.log.claims, history.log.runs, history.log.dead) == (log.log.claims, log.log.runs, log.log.dead)
        assert history.fates.drops().details == log.fates.drops().details
        assert history.notes == log.notes


@pytest.mark.slow
def test_every_page_of_an_export_is_that_of_the_log(tmp_path: Path) -> None:
    bus, pieces = make_demo()
    # Behind the records of the newest run lie none of others, which an export does not have.
    run_id = "sokoban-fork"
    export_run(bus, run_id, tmp_path)
    assert_pages_alike(replace(bus, run_id=run_id), bus_of(*open_export(tmp_path)), run_id, pieces)


def test_the_commands_read_an_export_without_a_broker(sound: SoundRun, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, log = sound.pipeline.settings(), replace(sound.pipeline.bus, role="operator")
    monkeypatch.setattr("echo_ops.cli.past.reach_bus", lambda _settings: log)
    for name in ("show", "lineage", "search"):
        monkeypatch.setattr(f"echo_ops.cli.{name}.read_settings", lambda _config: settings)
    for command in (["show", "demo/1"], ["show", "v3"], ["lineage", "v2"], ["search", "^c$", "--step", "1..2"], ["show", "0:3"]):
        of_the_log = CliRunner().invoke(app, [*command, "--json", "--run", DEMO])
        of_the_export = CliRunner().invoke(app, [*command, "--json", "--from", str(folder)])
        assert (of_the_export.exit_code, of_the_export.stdout) == (0, of_the_log.stdout), command
        assert of_the_log.stdout
    followed = CliRunner().invoke(app, ["search", "c", "--follow", "--from", str(folder)])
    assert "does not go on" in " ".join(followed.output.split())


def test_the_command_shows_an_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_ops.cli.view._until_ended", lambda: None)
    shown = CliRunner().invoke(app, ["view", str(folder)])
    assert (shown.exit_code, f"{DEMO} is shown at http://127.0.0.1:" in shown.output) == (0, True), shown.output
    both = CliRunner().invoke(app, ["view", str(folder), "--demo"])
    assert (both.exit_code, "contradict each other" in " ".join(both.output.split())) == (2, True)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def changed(folder: Path, change: Any) -> None:
    path = folder / f"run={DEMO}" / NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def of_an_earlier_release(content: dict[str, Any]) -> None:
    content["files"] = [file for file in content["files"] if file["slot"]["table"] != Table.RECORDS]
    content["ranges"] = {topic: content["ranges"][topic] for topic in ("trajectories", "rewards")}


def test_an_export_of_an_earlier_release_says_what_is_missing_and_an_export_adds_it(sound: SoundRun, copied: Path) -> None:
    changed(copied, of_an_earlier_release)
    with pytest.raises(UserError, match="exported by an earlier release") as refused:
        bus_of(*open_export(copied))
    assert f"echoswarm export --to {copied} --run {DEMO}" in refused.value.hint
    export_run(sound.pipeline.bus, DEMO, copied)
    assert records(bus_of(*open_export(copied)), Selection()) == records(sound.pipeline.bus, Selection())


def test_the_folder_of_the_run_in_an_export_is_the_export_too(folder: Path) -> None:
    home, manifest = open_export(folder / f"run={DEMO}")
    assert (home, manifest.run_id) == (folder / f"run={DEMO}", DEMO)


def test_of_an_archive_the_error_names_its_export(tmp_path: Path) -> None:
    (tmp_path / "demo" / "export").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no export") as refused:
        open_export(tmp_path / "demo")
    assert refused.value.hint == f"That of an archive is {tmp_path / 'demo' / 'export'}."


def test_scores_of_a_rescore_are_no_run(copied: Path) -> None:
    changed(copied, lambda content: content.update(rescored=["brevity", "1"]))
    with pytest.raises(UserError, match="holds the scores of 'brevity' from a rescore"):
        bus_of(*open_export(copied))


def test_a_file_that_is_gone_is_named(copied: Path) -> None:
    home, manifest = open_export(copied)
    with History(bus_of(home, manifest), DEMO) as history:
        for file in manifest.files:
            if file.slot.table is Table.TRAJECTORIES:
                (home / file.path).unlink()
        with pytest.raises(UserError, match=r"\.parquet cannot be read") as refused:
            list(history.read())
    assert "--verify" in refused.value.hint


def test_verify_finds_a_record_that_is_there_twice(copied: Path) -> None:
    home, manifest = open_export(copied)
    steps = [file for file in manifest.files if file.slot.topic == "steps"]
    files = tuple(sorted((*manifest.files, steps[0]), key=lambda file: file.slot))
    assert any("there twice" in each for each in verify_export(home, replace(manifest, files=files)).problems)
    # Offsets that the manifest does not have are no part of it.
    ranges = {**manifest.ranges, "steps": {0: (0, 1)}}
    assert any("it may hold" in each for each in verify_export(home, replace(manifest, ranges=ranges)).problems)
