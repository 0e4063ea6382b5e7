"""Processes of a benchmark: each has its own log, is asked to end at the end of its block, and is killed if the benchmark dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from echo_embedded.guard import Guard

_BENCH = Path(__file__).resolve().parent
_END_S = 60.0
_SHOWN = 2_000


@contextmanager
def running(
    guard: Guard, folder: Path, name: str, *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python ARGUMENTS` in `folder`, with the log `<name>.log`. It can import the modules of the benchmarks and of the tests."""
    path = os.pathsep.join(filter(None, (str(_BENCH), str(_BENCH.parent), os.environ.get("PYTHONPATH", ""))))
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **(environ or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    guard.protect(process.pid)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        guard.release(process.pid)


def logs_of(folder: Path) -> str:
    """The ends of all logs, to print before a benchmark's folder is removed."""
    return "".join(f"\n--- {log.name}\n{log.read_text(encoding='utf-8')[-_SHOWN:]}" for log in sorted(folder.glob("*.log")))
