"""The learning laboratory runs: the baseline, and one run with all that conditions put in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="cells are trained: install the extra 'learner'")
pytest.importorskip("faust", reason="a run has its rewards scored: install the extra 'streams'")
pytest.importorskip("scipy", reason="claims are tested with scipy: install the extra 'all-cpu'")

from laboratory.matrix import Choice, load_cells
from laboratory.pipeline import run_pipeline

from echo_ops.preflight import examine
from echo_settings import Settings
from tests.thorough import IS_THOROUGH, only_thorough

BENCH = Path(__file__).parents[3] / "bench"
MATRIX = BENCH / "laboratory" / "matrix.toml"
SMALL = """
steps = 2

[evaluation]
every = 40
prompts = 4
samples = 1
final_prompts = 4

[sets.small]
tasks = ["reverse-digits"]
conditions = ["co-located", "everything"]
seeds = 1

[tasks.reverse-digits]
demo = "reverse"
settings.learner.groups_per_step = 8

[conditions.co-located]
colocated = true
settings.staleness = { budget = 1, publication_period = 1 }

[conditions.everything]
settings.staleness = { budget = 1, publication_period = 1, over_budget = "withhold" }
settings.scoring = { concurrency = 8192, timeout_s = 60 }
settings.learner.loss = "laboratory.parts:uncorrected"
settings.rewards = { "laboratory.parts:late" = 1.0 }
settings.rollout = { engine = "laboratory.parts:Elsewhere", options = { seconds = 0.2 } }
"""
if IS_THOROUGH:
    # Each death is the start of another worker, the dearest part of the run.
    SMALL += "kill_every_s = 8\n"


def learning(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "learning.py"), "--matrix", str(folder / "matrix.toml"), "--set", "small"]
    command += ["--folder", str(folder / "cells"), "--engine", "transformers", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=folder)


@pytest.mark.kafka
@pytest.mark.slow
def test_each_kind_of_cell_runs(tmp_path: Path) -> None:
    (tmp_path / "matrix.toml").write_text(SMALL, encoding="utf-8")
    picture, numbers = tmp_path / "curves.png", tmp_path / "numbers.json"
    answer = learning(tmp_path, "--picture", str(picture), "--json", str(numbers))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "2/2] reverse-digits.everything.0 finished" in answer.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text(encoding="utf-8"))["reverse-digits"]["conditions"]
    assert set(found) == {"co-located", "everything"}
    for condition in found.values():
        assert condition["samples"] == 2 * 8 * 8
        assert 0 <= condition["accuracy"] <= 1
        assert set(condition["held_out"]) == {"0", "2"}
    assert found["co-located"]["max_staleness"] == 1
    assert found["co-located"]["held_out"]["0"] == pytest.approx(found["everything"]["held_out"]["0"], abs=0.75)


@pytest.mark.kafka
@only_thorough
def test_a_cell_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "matrix.toml").write_text(SMALL.replace('loss = "laboratory.parts:uncorrected"', 'loss = "laboratory.parts:none"'))
    (cell,) = load_cells(tmp_path / "matrix.toml", "small", Choice(conditions=["everything"], engine="transformers"))
    with pytest.raises(RuntimeError, match="has no attribute 'none'"):
        run_pipeline(cell, tmp_path, 300)


@pytest.mark.parametrize("name", ["nightly", "staleness", "rates", "weights", "pools", "policies", "losses", "tasks", "rising"])
def test_nothing_stands_against_any_cell(name: str) -> None:
    for cell in load_cells(MATRIX, name, Choice(seeds=1)):
        objections = [each for each in examine(Settings.model_validate(cell.settings), quickly=True) if not each.is_note]
        assert not objections, (cell.name, objections)
