"""`echoswarm up` on a real Kafka, with real processes whose roles only write records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo_bus.clock import Deadline
from echo_schemas.naming import Namespace

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
DRIVER = Path(__file__).with_name("supervised.py")
WAIT_S = 300.0


class Case:
    """One supervised run and what it left behind."""

    def __init__(self, folder: Path, bootstrap: str, namespace: str) -> None:
        self.folder = folder
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
            "ECHO_KAFKA__BOOTSTRAP": bootstrap,
            "ECHO_KAFKA__NAMESPACE": namespace,
            "ECHO_CHECKPOINT__FOLDER": str(folder / "run"),
            "ECHO_STATE_FOLDER": str(folder / "state"),
        }

    def start(self, behaviour: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(DRIVER), str(self.folder), behaviour]
        return subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, behaviour: str) -> tuple[int, str]:
        with self.start(behaviour) as process:
            output, _ = process.communicate(timeout=WAIT_S)
            return process.returncode, output

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    @property
    def drained(self) -> list[str]:
        return (self.folder / "order").read_text(encoding="utf-8").split()

    def child(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{name}.pid").read_text(encoding="utf-8")))

    def assert_nobody_is_left(self) -> None:
        for file in self.folder.glob("*.pid"):
            assert not is_running(int(json.loads(file.read_text())["pid"])), f"{file.stem} still runs"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def case(tmp_path: Path, kafka_bootstrap: str, namespace: Namespace) -> Case:
    return Case(tmp_path, kafka_bootstrap, namespace.name)


def test_a_run_ends_by_itself_with_a_summary_and_a_report(case: Case) -> None:
    code, output = case.run("train")
    assert code == 0, output
    found = case.summary
    assert (found["outcome"], found["steps"], found["trajectories_published"], found["trajectories_trained"]) == ("finished", 12, 5, 48)
    assert found["dropped"] == {"expired": 1}
    assert found["reward_first"] == pytest.approx(0.275)
    assert found["reward_last"] == pytest.approx(0.375)
    assert 0 < found["seconds_to_first_step"] < found["wall_seconds"]
    assert found["logprob_samples"] == 4
    assert set(found["startup_s"]) >= {"kafka", "topics", "learner_ready", "published", "installed", "trajectory", "step"}
    assert "step 12/12" in output
    assert "finished: 12 steps" in output
    assert "</html>" in (case.folder / "report.html").read_text(encoding="utf-8")
    assert sorted(case.drained) == ["feeder", "reward-0", "worker-0"]
    case.assert_nobody_is_left()


def test_a_run_that_has_finished_keeps_its_report_when_it_is_started_again(case: Case) -> None:
    assert case.run("train")[0] == 0
    report = (case.folder / "report.html").read_bytes()
    for file in case.folder.glob("*.up"):
        file.unlink()
    code, output = case.run("again")
    assert code == 0, output
    assert "All 12 steps were trained before; report and summary stay." in output
    assert (case.summary["outcome"], case.summary["steps"]) == ("finished", 12)
    assert (case.folder / "report.html").read_bytes() == report


def test_a_learner_that_disagrees_with_its_workers_fails_the_command(case: Case) -> None:
    code, output = case.run("disagree")
    assert code == 1
    assert "Learner and worker differ by 2.0e-02" in " ".join(output.split())
    assert case.summary["outcome"] == "finished"
    assert case.summary["logprob_max_diff"] == pytest.approx(2e-2)


def test_a_role_that_dies_ends_the_run_and_is_named_with_its_last_words(case: Case) -> None:
    code, output = case.run("die")
    assert code == 1
    assert "The reward 'reward-0' ended with exit code 7, so the run has ended." in output
    assert "the reward function ate the disk" in output
    assert str(case.folder / "run" / "logs" / "reward-0.log") in output
    assert "Traceback" not in output
    assert case.summary["outcome"] == "died"
    assert case.summary["steps"] == 3
    case.assert_nobody_is_left()


def test_an_interrupt_drains_everybody(case: Case) -> None:
    code, output = case.run("interrupt")
    assert code == 130, output
    assert sorted(case.drained) == ["feeder", "learner", "reward-0", "worker-0"]
    assert case.summary["outcome"] == "interrupted"
    case.assert_nobody_is_left()


def test_a_run_that_was_told_to_stop_says_what_must_come_before_its_next_start(case: Case) -> None:
    _, output = case.run("stop")
    assert "was told to stop: `echoswarm runs resume demo` lets it start again." in output, output


def test_a_second_interrupt_ends_everything_at_once(case: Case) -> None:
    code, output = case.run("freeze")
    assert code == 130, output
    assert "did not drain in time" not in output
    case.assert_nobody_is_left()


def test_children_do_not_outlive_a_supervisor_that_was_killed(case: Case) -> None:
    with case.start("stay") as process:
        deadline = Deadline.after(WAIT_S)
        while not (case.folder / "learner.pid").exists() or not (case.folder / "feeder.pid").exists():
            assert process.poll() is None, "the supervisor has ended"
            assert not deadline.expired(), "waited for the children"
        pids = [case.child(name)["pid"] for name in ("learner", "feeder")]
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WAIT_S)
    while any(is_running(pid) for pid in pids):
        assert not deadline.expired(), "waited for the children to die with their supervisor"
