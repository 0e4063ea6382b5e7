"""A worker that is killed: starts a server, and dies of SIGKILL once it runs.

python -m tests.integration.engines.owner FILE
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from echo_rollout.engines import openai_server
from echo_schemas.records import WeightKind


def main() -> None:
    """Never returns."""
    openai_server._MODULE = "tests.integration.engines.fake_api_server"
    pids = Path(sys.argv[1])
    openai_server.ServerProcess({"pids": str(pids)}, WeightKind.LORA).start()
    while not pids.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
