"""While a group's coordinator moves, the supervisor's questions are not answered, and it lives on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.ops import nobodys_coordinator


def test_a_group_without_a_coordinator_does_not_end_who_asks_for_its_lag() -> None:
    script = Path(nobodys_coordinator.__file__)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(nobodys_coordinator.END), "unreachable"]), done.stderr
