"""`python -m tests.upgrade.census CONFIG FILE`: every record of a namespace into FILE, as the release that runs this reads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from echo_runtime.opening import open_bus
from echo_settings import load_settings
from tests.chaos.scene import dump_log

if __name__ == "__main__":
    dump_log(open_bus(load_settings(Path(sys.argv[1]), os.environ), "view"), Path(sys.argv[2]))
