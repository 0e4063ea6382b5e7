"""The benchmark of weights runs, names its figures, and leaves nothing in shared memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import weights

from echo_rollout.snapshot_folders import snapshot_folder


def test_a_short_run_leaves_no_snapshots_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folders = tmp_path / "figures.json", []

    @contextmanager
    def noted(num_bytes: int) -> Iterator[Path]:
        with snapshot_folder(num_bytes) as folder:
            yield folder
            folders.append((folder, len(list(folder.iterdir()))))

    monkeypatch.setattr(weights, "snapshot_folder", noted)
    monkeypatch.setattr(weights, "SIZES", {"small_s": 100_000})
    monkeypatch.setattr(sys, "argv", ["weights.py", "--rounds", "1", "--json", str(file)])
    weights.main()
    ((folder, num_snapshots),) = folders
    assert num_snapshots > 0, "The watcher kept its snapshots elsewhere."
    assert not folder.exists()
    stages = [f"small_{stage}_s" for stage in (*weights.STAGES, *weights.CPU_STAGES, "bare")]
    assert set(json.loads(file.read_text(encoding="utf-8"))) == {"small_s", *stages}
