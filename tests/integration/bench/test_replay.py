"""The benchmark of the past runs and names its figures; what they are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import only_thorough

BENCH = Path(__file__).parents[3] / "bench" / "replay.py"
RATES = {"scan_per_s", "export_per_s", "rescore_per_s", "bare_decode_per_s", "bare_export_per_s"}


@pytest.mark.kafka
@pytest.mark.slow
@only_thorough
def test_a_short_run_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--records", "2048", "--many", "4096", "--rounds", "1", "--json", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert set(figures) == {*RATES, "cpu_us", "seek_s", "attach_to_score_s", "peak_mb"}
    assert set(figures["cpu_us"]) == RATES
    assert all(value > 0 for name, value in figures.items() if name != "cpu_us")
    assert "of bare decoding" in answer.stdout
