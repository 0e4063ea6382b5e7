"""The log of a process: lines for people, or one JSON object per line for programs.

    {"time": "2026-03-01T10:20:30.123Z", "level": "WARNING", "logger": "echo_rollout.group_work", "message": "…", "run": "digits-7",
     "role": "worker", "process": "worker.gpu-7", "release": "0.1.0", "group": "digits-7/512"}

`group` and `version` (of the policy) appear if the task or thread has set them (`logged_with`), or the line itself:
`logger.debug("…", extra={"group": group_id})`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]
LogLevel = Literal["info", "debug"]

_TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_INHERITED = "ECHOSWARM_LOG_FIELDS"
"""Environment variable with the fields of this process, for its child processes."""
# With 0 vLLM's lines come through this log instead of its own.
_VLLM_PRINTS = "VLLM_CONFIGURE_LOGGING"
# The progress bars of transformers are no objects.
_BARS_OFF = "TQDM_DISABLE"
# What only this line is about.
_EXTRA = ("group", "version")
_OURS = ("echo_bus", "echo_learner", "echo_replay", "echo_rollout", "echo_runtime", "echo_streams", "echo_tasks")
# These HTTP clients log a line at INFO for each request.
_TALKATIVE = ("httpx", "httpx2")
_about: ContextVar[Mapping[str, Any]] = ContextVar("what log records are about")


@contextmanager
def logged_with(*, group: str | None = None, version: int | None = None) -> Iterator[None]:
    """Add these fields to the log records of this thread or task inside the block."""
    named = {name: value for name, value in (("group", group), ("version", version)) if value is not None}
    token = _about.set({**_about.get({}), **named})
    try:
        yield
    finally:
        _about.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per record, always on one line; it contains an exception with its traceback."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Each object contains `fields`."""
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message_of(record),
            **self._fields,
            **_about.get({}),
            **{name: record.__dict__[name] for name in _EXTRA if name in record.__dict__},
        }
        if record.exc_info and record.exc_info[0] is not None:
            said["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = self.formatStack(record.stack_info)
        return json.dumps(said, default=str)


def set_up_logs(file: Path | None, form: LogFormat, *, run: str, role: str, process: str, level: LogLevel = "info") -> None:
    """Log to standard error, or to `file`; libraries at INFO. As JSON also Python's warnings, and what ends a thread or the process."""
    fields = {"run": run, "role": role, "process": process, "release": version_of("echoswarm")}
    os.environ.pop(_INHERITED, None)
    if form == "json":
        os.environ[_INHERITED] = json.dumps(fields)
        os.environ.setdefault(_VLLM_PRINTS, "0")
        os.environ.setdefault(_BARS_OFF, "1")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    _write_to(logging.StreamHandler(sys.stderr) if file is None else logging.FileHandler(file, encoding="utf-8"))
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())


def set_up_logs_as_parent() -> None:
    """Set up the log of a role's child process, on the standard error that both share."""
    _write_to(logging.StreamHandler(sys.stderr))


def _write_to(handler: logging.Handler) -> None:
    inherited = os.environ.get(_INHERITED)
    handler.setFormatter(logging.Formatter(_TEXT, "%H:%M:%S") if inherited is None else JsonFormatter(json.loads(inherited)))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    if inherited is not None:
        logging.captureWarnings(True)
        sys.excepthook = lambda kind, error, trace: logger.critical("The process ends with %r", error, exc_info=(kind, error, trace))
        threading.excepthook = _note_end_of_thread


def _note_end_of_thread(what: threading.ExceptHookArgs) -> None:
    if what.exc_type is SystemExit or what.exc_value is None:
        return
    name = "unknown" if what.thread is None else what.thread.name
    logger.critical(
        "The thread %r ends with %r", name, what.exc_value, exc_info=(what.exc_type, what.exc_value, what.exc_traceback)
    )  # fmt: skip


def _message_of(record: logging.LogRecord) -> str:
    """The message of a record; unformatted if its arguments do not fit, because logging must not raise."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        return f"{record.msg} {record.args!r}"
