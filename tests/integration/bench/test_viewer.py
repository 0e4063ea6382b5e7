"""The benchmark of the viewer runs and names its figures; what they are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import only_thorough

BENCH = Path(__file__).parents[3] / "bench" / "viewer.py"
FIGURES = {
    *("trajectories", "open_s", "first_page_ms", "page_p50_ms", "page_p95_ms", "p95_ms"),
    *("sql_ms", "page_p95_beside_export_ms"),
}


@pytest.mark.kafka
@pytest.mark.slow
@only_thorough
def test_a_small_run_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--trajectories", "8000", "--json", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert set(figures) == FIGURES
    assert figures["trajectories"] == 7 * 1024
    assert all(value > 0 for name, value in figures.items() if name != "p95_ms")
