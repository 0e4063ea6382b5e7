"""The notebook of `examples/` answers its five questions from an export."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("marimo", reason="install the extra 'notebook'")

from echo_replay.export.exporter import export_run
from echo_replay.history import History
from echo_replay.selection import Fate
from echo_schemas.records import Purpose, TrajectorySource
from tests.unit.replay.forged import SoundRun

pytestmark = [pytest.mark.slow]

NOTEBOOK = Path(__file__).parents[3] / "examples" / "first_questions.py"
_WAIT_S = 120.0


def answers(folder: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("first_questions", NOTEBOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, definitions = module.app.run(defs={"folder": str(folder), "run": ""})
    return dict(definitions)


def test_it_answers_from_an_export(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, "demo", tmp_path)
    found = answers(tmp_path)
    with History(sound.pipeline.bus, "demo") as history:
        told = [each for each in history.read() if each.trajectory is not None]
    trained = [each for each in told if each.fate is Fate.TRAINED]
    assert {row["step"] for row in found["curve"]} == {each.step for each in trained}
    why = Counter(
        each.drop.why.value if each.drop else each.fate.value
        for each in told
        if each.trajectory is not None and each.trajectory.purpose is Purpose.TRAIN
    )
    assert {row["why"]: row["samples"] for row in found["dropped"]} == why
    ages = Counter(
        (each.step or 0) - 1 - each.trajectory.min_version
        for each in trained
        if each.trajectory is not None and each.trajectory.source is TrajectorySource.LIVE
    )
    assert {row["staleness"]: row["samples"] for row in found["ages"]} == ages
    assert {row["worker_id"] for row in found["workers"]} <= {each.trajectory.worker_id for each in told if each.trajectory is not None}
    assert found["useless"]
    assert all(0 <= row["without_signal"] <= row["groups"] for row in found["useless"])


def test_as_a_program_it_says_where_no_export_is(tmp_path: Path) -> None:
    command = [sys.executable, str(NOTEBOOK), "--from", str(tmp_path / "nothing")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S)
    assert answer.returncode != 0
    assert "holds no export" in answer.stderr
