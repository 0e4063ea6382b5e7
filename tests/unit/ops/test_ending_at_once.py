"""A process whose drain takes too long ends at once, and leaves nothing of its own behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROLE = """
import os, signal, sys, time
from pathlib import Path
from echo_runtime.process import open_role
from echo_settings import load_settings

settings = load_settings(None, {"ECHO_KAFKA__BOOTSTRAP": "127.0.0.1:1", "ECHO_RUN__DRAIN_S": "0.2"})
with open_role(settings, "worker") as process:
    process.scratch.append(Path(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_folders_of_a_process_that_has_to_end_at_once_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "model.safetensors").write_bytes(b"0" * 1000)
    ended = subprocess.run([sys.executable, "-c", _ROLE, str(folder)], capture_output=True, text=True, check=False, timeout=50)
    assert "The drain did not end within" in ended.stderr, ended.stderr
    assert ended.returncode != 0
    assert not folder.exists()
