"""The tests' end of it: one process for one module of jobs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_START_S = 100.0
_JOB_S = 300.0
# Threads would fight for two cores, and a forked process must not have had any.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Refused(Exception):
    """The job raised a UserError; its sentence and hint."""


class ForkingProcess:
    """Runs functions of `module`, each in a fork of one process that has everything imported."""

    def __init__(self, module: str, folder: Path, *, job_s: float = _JOB_S) -> None:
        self._folder = folder
        self._job_s = job_s
        self._log = (folder / "log").open("wb")
        self._num_jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_ONE_THREAD, "HF_HUB_OFFLINE": "1"},
            cwd=Path(__file__).parents[2],
        )

    def run(self, job: str, **arguments: Any) -> Any:
        """What the job returns. Raises Refused if it raised a UserError, AssertionError with its traceback or the log otherwise."""
        self._num_jobs += 1
        answer = self._folder / f"{self._num_jobs}.json"
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(json.dumps({"job": job, "arguments": arguments, "answer": str(answer)}).encode() + b"\n")
        pipe_in.flush()
        self._wait(pipe_out, job, self._job_s + (0 if self._num_jobs > 1 else _START_S))
        if not answer.is_file():
            raise AssertionError(f"{job} died:\n{self._tail()}")
        content = json.loads(answer.read_text(encoding="utf-8"))
        if "refused" in content:
            raise Refused(content["refused"])
        assert "error" not in content, content["error"]
        return content["result"]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            pipe.close()

    def _wait(self, pipe: IO[bytes], job: str, timeout_s: float) -> None:
        ready, _, _ = select.select([pipe], [], [], timeout_s)
        assert ready, f"waited {timeout_s:g} s for {job}:\n{self._tail()}"
        pipe.readline()

    def _tail(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")[-4_000:]
