"""The reward and the test that `echoswarm reward new` writes run as they are, whatever pytest adds to the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echo_ops.rewards.template import write_template


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_the_written_test_passes(tmp_path: Path, mode: str) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --import-mode={mode}\n", encoding="utf-8")
    folder = tmp_path / "runs" / "reverse"
    folder.mkdir(parents=True)
    _, test = write_template(str(folder / "my_rewards.py:brevity"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test.name], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
