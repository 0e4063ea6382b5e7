"""The benchmark of the pool runs and names its figures; what they are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import only_thorough

BENCH = Path(__file__).parents[3] / "bench" / "pool.py"
FIGURES = {
    *("pool_per_s", "sum_per_s", "ratio", "fast_per_s", "slow_per_s"),
    *("slow_share", "fast_age_s", "slow_age_s", "slow_oldest_s"),
}


@pytest.mark.kafka
@pytest.mark.slow
@only_thorough
def test_a_short_run_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--seconds", "4", "--json", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert set(figures) == FIGURES
    assert all(value > 0 for value in figures.values())
    assert figures["slow_share"] < 0.5
    assert "pool_per_s" in answer.stdout
