"""Snapshots above 10 GiB from worker to worker, in memory that does not grow with them."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.thorough import only_thorough

ROOT = Path(__file__).parents[3]
logger = logging.getLogger(__name__)


# Twelve gigabytes are written, hashed and read several times.
@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "num_bytes", [(64 << 20) + 12_345, pytest.param((12 << 30) + 12_345, marks=only_thorough)], ids=["64 MiB", "12 GiB"]
)
def test_a_snapshot_that_no_memory_holds_is_passed_on(num_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < 2 * num_bytes:
            pytest.skip("there is no room for it")
        command = [sys.executable, "-m", "tests.integration.rollout.large_snapshot", folder, str(num_bytes)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3_500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    logger.warning("%d bytes: %s", num_bytes, found)
    assert found["is_same"]
    assert found["received"] > 0.4 * num_bytes, "the other worker gave its part"
    assert found["received"] + found["truth"] == num_bytes
    assert found["largest_memory"] < 400e6
