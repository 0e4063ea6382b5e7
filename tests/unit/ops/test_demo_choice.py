"""Which packaged run `echoswarm demo` means, and which one that was begun before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import pytest

from echo_ops.cli.demo import demo, demo_name, unfinished
from echo_schemas.errors import UserError


@pytest.mark.parametrize(
    ("name", "task", "packaged"),
    [
        (None, None, "reverse"),
        ("reverse", None, "reverse"),
        ("sort", None, "sort"),
        (None, "sokoban", "sokoban"),
        (None, "knights-knaves", "knights-knaves"),
    ],
)
def test_every_choice_is_packaged(name: str | None, task: str | None, packaged: str) -> None:
    assert demo_name(name, task) == packaged
    assert resources.files("echo_ops.demo").joinpath(f"{packaged}.toml").is_file()


def test_a_digits_demo_of_a_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"no demo sort of sokoban.*`echoswarm demo sort` or `echoswarm demo --task sokoban`"):
        demo_name("sort", "sokoban")


SAID: Mapping[str, object] = {"mode": "asynchronous", "seed": 0, "steps": None, "kafka": None}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the runs below the present one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def begun(runs: Path, name: str, said: Mapping[str, object] = SAID, outcome: str | None = None) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "demo.json").write_text(json.dumps(said), encoding="utf-8")
    if outcome is not None:
        (folder / "summary.json").write_text(json.dumps({"outcome": outcome}), encoding="utf-8")
    return folder.relative_to(runs.parent)


@pytest.mark.parametrize("outcome", [None, "died", "interrupted"])
def test_the_newest_that_did_not_finish_is_gone_on_with(runs: Path, outcome: str | None) -> None:
    begun(runs, "reverse-20261121-100000")
    newest = begun(runs, "reverse-20261121-110000", outcome=outcome)
    begun(runs, "sort-20261121-120000")
    assert unfinished("reverse", SAID) == newest


def test_one_that_finished_is_over(runs: Path) -> None:
    assert unfinished("reverse", SAID) is None
    begun(runs, "reverse-20261121-100000", outcome="finished")
    assert unfinished("reverse", SAID) is None


@pytest.mark.parametrize("other", [{"seed": 1}, {"steps": 40}, {"mode": "sequential"}, {"kafka": "127.0.0.1:9092"}])
def test_what_another_command_began_or_another_kafka_holds_is_another_run(runs: Path, other: dict[str, object]) -> None:
    begun(runs, "reverse-20261121-100000", {**SAID, **other})
    assert unfinished("reverse", SAID) is None


def test_folders_of_others_are_passed_over(runs: Path) -> None:
    (runs / "reverse-mine").mkdir(parents=True)
    (runs / "reverse-torn").mkdir()
    (runs / "reverse-torn" / "demo.json").write_text('{"mode"', encoding="utf-8")
    assert unfinished("reverse", SAID) is None


def test_one_that_is_refused_leaves_no_folder_and_is_not_gone_on_with(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("A learner is alive in this namespace.")

    monkeypatch.setattr("echo_ops.cli.demo.execute", refuse)
    monkeypatch.setattr("echo_ops.cli.demo.given_bootstrap", lambda _: None)
    with pytest.raises(UserError, match="A learner is alive"):
        demo()
    assert not list(runs.iterdir())
    going = begun(runs, "reverse-20261121-100000")
    with pytest.raises(UserError, match="A learner is alive"):
        demo()
    assert (going / "demo.json").exists()
    assert "It has not finished" not in capsys.readouterr().out
