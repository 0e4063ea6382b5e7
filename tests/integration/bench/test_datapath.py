"""The benchmark of the data path runs and names its figures; what they are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import only_thorough

BENCH = Path(__file__).parents[3] / "bench" / "datapath.py"
FIGURES = {
    "concurrent_per_s",
    "bare_concurrent_per_s",
    "readback_per_s",
    "bare_readback_per_s",
    "p50_ms",
    "p99_ms",
    "encode_us",
    "decode_us",
    "bare_encode_us",
    "bare_decode_us",
    "trace_us",
    *(f"{done}_{name}_us" for name in ("trajectory", "reward") for done in ("sign", "read", "read_signed")),
}


@pytest.mark.kafka
@only_thorough
def test_a_quick_run_writes_every_figure_and_its_conditions(kafka_bootstrap: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    answer = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--json", str(file)], capture_output=True, text=True, check=False, timeout=500
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert set(figures) == {*FIGURES, "conditions"}
    assert all(figures[name] > 0 for name in FIGURES)
    assert {"cores", "broker", "acks", "payload_bytes", "bytes_per_token"} <= set(figures["conditions"])
    assert "written and read at once" in answer.stdout
