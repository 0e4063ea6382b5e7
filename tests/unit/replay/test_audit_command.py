"""`echoswarm audit`: one line a promise, a file for programs, and an exit code that says which verdict was the worst."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

import echo_ops.cli.audit as command
from echo_ops.cli.output import ExitCode
from echo_replay.verdicts import Promise
from echo_schemas.errors import UserError
from echo_schemas.records import StepReport
from echo_schemas.topics import RUNS
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import SoundRun, only, run_record, without_any_policy

Command = Callable[..., int]
PROMISES = [promise for promise in Promise if promise is not Promise.SIGNED]
"""Of a run that asks for no signatures."""


@pytest.fixture
def run_audit(monkeypatch: pytest.MonkeyPatch) -> Command:
    """`run_audit(pipeline, *runs, …)`: the exit code."""

    def begin(pipeline: Pipeline, *runs: str, json_file: Path | None = None, allow_unproved: bool = False) -> int:
        monkeypatch.setattr(command, "read_settings", lambda _config: pipeline.settings())
        monkeypatch.setattr(command, "reach_bus", lambda _settings: replace(pipeline.bus, role="operator"))
        codes: list[int] = []
        monkeypatch.setattr("sys.exit", codes.append)
        command.audit(None, list(runs), json_file=json_file, allow_unproved=allow_unproved)
        return codes[0] if codes else 0

    return begin


def written(file: Path) -> dict[str, Any]:
    (found,) = json.loads(file.read_text(encoding="utf-8"))["runs"]
    content: dict[str, Any] = found
    return content


def test_a_sound_run_exits_with_0(run_audit: Command, sound: SoundRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "audit.json"
    assert run_audit(sound.pipeline, json_file=file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("demo: 6 steps, ")
    assert [line.split()[0] for line in lines[1:] if line.startswith("  p")] == ["proved"] * len(PROMISES)
    content = written(file)
    assert content["verdict"] == "proved"
    assert [each["promise"] for each in content["promises"]] == [promise.value for promise in PROMISES]


def test_a_broken_run_exits_with_4_and_shows_what_breaks_it(
    run_audit: Command, sound: SoundRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = sound.forge(tmp_path / "copy", only(StepReport, lambda report: () if report.version == 3 else (report,)))
    file = tmp_path / "audit.json"
    assert run_audit(copy, json_file=file, allow_unproved=True) == ExitCode.BROKEN
    printed = capsys.readouterr()
    assert "BROKEN" in printed.out
    assert "Versions are missing between two reports. version 4, predecessor 2" in printed.err
    chain = next(each for each in written(file)["promises"] if each["promise"] == "steps-chain")
    assert chain["verdict"] == "broken"
    assert chain["examples"] == [{"says": "Versions are missing between two reports.", "version": 4, "predecessor": 2}]


def test_an_unproved_run_exits_with_5_unless_that_is_allowed(
    run_audit: Command, sound: SoundRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = sound.forge(tmp_path, without_any_policy)
    assert run_audit(copy) == ExitCode.UNPROVED
    assert "because neither the reports nor `runs` say" in capsys.readouterr().out
    assert run_audit(copy, allow_unproved=True) == 0


def test_the_worst_of_several_runs_decides(run_audit: Command, sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    copy.write(RUNS, run_record(copy, "empty"))
    assert run_audit(copy, "empty", "demo") == 0
    copy = sound.forge(tmp_path / "broken", only(StepReport, lambda report: (report, report)))
    copy.write(RUNS, run_record(copy, "empty"))
    assert run_audit(copy, "demo", "empty") == ExitCode.BROKEN


def test_of_an_unknown_name_the_error_names_the_runs_that_there_are(run_audit: Command, sound: SoundRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="knows no run 'demos'") as refused:
        run_audit(sound.pipeline, "demo", "demos")
    assert refused.value.hint.startswith("Its newest: demo.")
    with pytest.raises(UserError, match="knows no run 'demo'") as refused:
        run_audit(Pipeline(tmp_path))
    assert "No run was ever accepted there" in refused.value.hint
