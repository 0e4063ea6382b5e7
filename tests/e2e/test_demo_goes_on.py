"""`echoswarm demo`, killed and typed again: the same run goes on, on the Kafka that it keeps in its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from echo_runtime.announcement import read_announcement
from tests.installed import missing
from tests.thorough import IS_THOROUGH

_MISSING = missing("vllm", "faust", "deepspeed")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]

STEPS = 5 if IS_THOROUGH else 3
COMMAND = [sys.executable, "-m", "echo_ops.cli", "demo", "--task", "knights-knaves", "--plain", "--steps", str(STEPS)]
WAIT_S = 900.0


def await_said(output: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    deadline, nap = Deadline.after(WAIT_S), threading.Event()
    while words not in output.read_text(encoding="utf-8"):
        assert process.poll() is None, output.read_text(encoding="utf-8")
        assert not deadline.expired(), f"waited for {words!r}"
        nap.wait(0.1)


def test_a_demo_that_was_killed_goes_on_when_it_is_typed_again(tmp_path: Path, jars: None) -> None:
    """`everything`: the supervisor, and with it the broker and every role; a thorough run kills the learner alone before."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    environ |= {"ECHO_STATE_FOLDER": str(tmp_path / "state"), "ECHO_ROLLOUT__ENGINE": "transformers"}
    victims = {"learner": 1, "everything": 3} if IS_THOROUGH else {"everything": 1}
    said = {}
    for number, (victim, step) in enumerate(victims.items()):
        output = tmp_path / f"{victim}.txt"
        with output.open("wb") as file, subprocess.Popen(COMMAND, cwd=tmp_path, env=environ, stdout=file, stderr=file) as process:
            await_said(output, f"step {step}/{STEPS}", process)
            (folder,) = (tmp_path / "runs").iterdir()
            announced = read_announcement(folder / "processes" / "learner.json")
            assert announced is not None
            os.kill(announced.pid if victim == "learner" else process.pid, signal.SIGKILL)
            process.wait(WAIT_S)
        said[victim] = output.read_text(encoding="utf-8")
        assert ("going on with" in said[victim]) == (number > 0)
    if "learner" in said:
        assert "the same command goes on with it" in said["learner"]
    again = subprocess.run(COMMAND, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert again.returncode == 0, f"{again.stdout}{again.stderr}"
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert f"going on with {folder.relative_to(tmp_path)}" in again.stdout.replace("\n", " ")
    assert (folder / "logs" / "learner.log").read_text(encoding="utf-8").count("Going on from version") == len(victims)
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["outcome"] == "finished"
    assert not (folder / "kafka").exists(), "a finished demo leaves no broker's data behind"
