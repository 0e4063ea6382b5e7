"""The benchmark of broadcasts runs, names its figures, and a star takes longer than a chain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the steps whose deltas are measured are torch's: install the extra 'learner'")

BENCH = Path(__file__).parents[3] / "bench" / "broadcast.py"


def test_a_short_run_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [
        sys.executable,
        str(BENCH),
        "--mb",
        "4",
        "--mbit",
        "50",
        "--workers",
        "1",
        "4",
        "--lines",
        "buckets",
        "--layers",
        "1",
        "--json",
        str(file),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert figures["limit_s"] == 0.64
    assert set(figures) == {"mb", "mbit", "lines", "limit_s", "chain_s", "star_s", "delta_ratio", "delta_make_s", "delta_apply_s"}
    assert figures["delta_ratio"]["bfloat16"] < 0.1 < figures["delta_ratio"]["float32"]
    assert figures["star_s"]["4"] > 0.95 * 4 * figures["limit_s"]
    assert figures["star_s"]["4"] > figures["chain_s"]["4"] > 0.95 * figures["limit_s"]
