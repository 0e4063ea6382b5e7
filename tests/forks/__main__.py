"""A process that imports a module of jobs once, with all that is heavy, and forks itself for each job, since libraries keep state.

    python -m tests.forks MODULE      one JSON line a job on stdin: {job, arguments, answer}; one line when it is over

A job is a function of the module; what it returns, or how it failed, is written as JSON to the file `answer`. Its output goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from echo_schemas.errors import UserError


def serve(module: str) -> None:
    """Do jobs of `module` until stdin ends."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # What libraries say while they are imported is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs = importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            os._exit(_do(jobs, order))
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _do(jobs: Any, order: dict[str, Any]) -> int:
    answer: dict[str, Any] = {}
    try:
        answer["result"] = getattr(jobs, order["job"])(**order["arguments"])
    except UserError as exc:
        answer["refused"] = str(exc)
    except BaseException:  # whatever it is: the test shows it
        answer["error"] = traceback.format_exc()
    Path(order["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
