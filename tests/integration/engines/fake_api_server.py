"""Stands for vLLM's server: listens, has a process of its own that does not end when it is told to, and may die at once.

python -m tests.integration.engines.fake_api_server --host H --port P --pids FILE [--dies CODE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    """200 for everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--dies", type=int)
    arguments = parser.parse_args()
    if arguments.dies is not None:
        sys.exit(arguments.dies)
    assert os.environ["VLLM_API_KEY"], "the worker's key"
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", _STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    staged = arguments.pids.with_suffix(".new")
    staged.write_text(f"{os.getpid()} {child.pid}")
    staged.rename(arguments.pids)
    HTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
