"""Lines for programs: one JSON object a record, whatever is logged, with what it is about."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_ops.cli import run
from echo_ops.roles import Role, RoleEntry
from echo_runtime.logs import JsonFormatter, logged_with, set_up_logs, set_up_logs_as_parent
from echo_schemas.errors import UserError

logger = logging.getLogger("echo_rollout.somewhere")
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def restored() -> Iterator[None]:
    """Logging, hooks and environment as they were."""
    root, hooks, environ = logging.getLogger(), (sys.excepthook, threading.excepthook), dict(os.environ)
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    logging.captureWarnings(False)
    for handler in root.handlers:
        handler.close()
    root.handlers, (sys.excepthook, threading.excepthook) = handlers, hooks
    root.setLevel(level)
    for name in set(os.environ) - set(environ):
        del os.environ[name]


@pytest.fixture
def lines(tmp_path: Path, restored: None) -> Lines:
    """Logs as JSON to a file; its lines."""
    set_up_logs(tmp_path / "logs" / "a.log", "json", run="digits-7", role="worker", process="worker.gpu-7")
    return lambda: [json.loads(line) for line in (tmp_path / "logs" / "a.log").read_text().splitlines()]


def test_a_record_says_who_wrote_it(lines: Lines) -> None:
    logger.info("%d of %s", 3, "four")
    logger.debug("not said")
    logging.getLogger("httpx2").info("HTTP Request: GET http://registry/schemas/ids/3")
    (said,) = lines()
    assert said.pop("time").endswith("Z")
    assert said.pop("release")
    who = {"run": "digits-7", "role": "worker", "process": "worker.gpu-7"}
    assert said == {"level": "INFO", "logger": "echo_rollout.somewhere", "message": "3 of four", **who}


def test_it_says_what_it_is_about_where_that_is_known(lines: Lines) -> None:
    with logged_with(group="digits-7/512"), logged_with(version=12):
        logger.info("inside")
        thread = threading.Thread(target=lambda: logger.info("elsewhere"))
        thread.start()
        thread.join()
    logger.info("after")
    logger.info("of one line", extra={"group": "digits-7/513"})
    found = [(line.get("group"), line.get("version")) for line in lines()]
    assert found == [("digits-7/512", 12), (None, None), (None, None), ("digits-7/513", None)]


def test_one_record_is_one_line_whatever_it_holds(lines: Lines) -> None:
    logger.warning("two\nlines, “quotes”\u2028and %s", {"a": object})
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        logger.exception("It failed")
    first, failed = lines()
    assert first["message"].startswith("two\nlines")
    assert failed["level"] == "ERROR"
    assert failed["exception"].splitlines()[-2:] == ["ValueError: broken", "here"]


def test_libraries_are_told_to_print_nothing_between_the_lines(lines: Lines) -> None:
    """vLLM its own log, transformers the progress bars of tqdm."""
    assert (os.environ["VLLM_CONFIGURE_LOGGING"], os.environ["TQDM_DISABLE"]) == ("0", "1")


def test_a_record_whose_arguments_do_not_fit_is_said_as_it_is() -> None:
    record = logging.makeLogRecord({"msg": "no %d", "args": ("number",)})
    assert json.loads(JsonFormatter({}).format(record))["message"] == "no %d ('number',)"


def test_what_ends_a_thread_or_the_process_and_what_python_warns_of_are_records_too(lines: Lines) -> None:
    def fail() -> None:
        raise ValueError("in a thread")

    thread = threading.Thread(target=fail, name="reader")
    thread.start()
    thread.join()
    sys.excepthook(KeyError, KeyError("main"), None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    ended, died, warned = lines()
    assert (ended["level"], "reader" in ended["message"], "in a thread" in ended["exception"]) == ("CRITICAL", True, True)
    assert "KeyError" in died["exception"]
    assert "DeprecationWarning" in warned["message"]


def test_a_process_that_a_role_starts_logs_alike(lines: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs_as_parent()
    logger.info("rank 1")
    said = json.loads(capsys.readouterr().err)
    assert (said["message"], said["run"]) == ("rank 1", "digits-7")


def test_lines_for_people_stay_as_they_are(restored: None, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(None, "text", run="r", role="feeder", process="feeder")
    logger.warning("for people")
    assert capsys.readouterr().err.endswith(" W echo_rollout.somewhere: for people\n")


@pytest.mark.parametrize("by", ["option", "file"])
def test_a_role_logs_as_it_is_told_and_why_it_ends(
    by: str, restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "a"\n' + ('[logs]\nformat = "json"\n' if by == "file" else ""))

    def refuse(*_: object) -> None:
        raise UserError("There is no cluster.", hint="Start one.")

    monkeypatch.setattr(RoleEntry, "load", refuse)
    with pytest.raises(UserError):
        run.run_role(role=Role.FEEDER, config=config, name="b", log_format="json" if by == "option" else None)
    said = json.loads(capsys.readouterr().err)
    assert (said["message"], said["run"], said["process"]) == ("There is no cluster. Start one.", "a", "feeder.b")
