"""The benchmark of the simulation runs and names its figures; how close they are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import only_thorough

BENCH = Path(__file__).parents[3] / "bench" / "simulation.py"


@pytest.mark.kafka
@pytest.mark.slow
@only_thorough
def test_a_short_run_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--steps", "10", "--train-s", "1.5", "--json", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert file.exists(), answer.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))
    for pool in ("enough", "short"):
        assert set(figures[pool]["off"]) == {"steps_per_s", "staleness_mean", "bubble_ratio"}
        assert figures[pool]["real"]["staleness_max"] <= 3
    assert figures["short"]["real"]["bubble_ratio"] > figures["enough"]["real"]["bubble_ratio"]
