"""What an operator may mistype: one sentence that names it, what to do instead, no traceback. None of it needs a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from echo_embedded import detached
from echo_embedded.folders import STATE_VARIABLE
from echo_embedded.state import EmbeddedState, RecordedProcess
from echo_ops.cli.main import app
from echo_ops.cli.output import ExitCode

MEND = "def shorten(letter): return None\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a mend and a wrong configuration; no Kafka."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("ECHO_KAFKA__BOOTSTRAP", "ECHO_REGISTRY__URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mends.py").write_text(MEND)
    (tmp_path / "empty.toml").write_text('[kafka]\nbootstrap = ""\n')
    return tmp_path


def refused(*words: str) -> str:
    """What the command says when it refuses."""
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == ExitCode.USAGE, found.output
    assert isinstance(found.exception, SystemExit), found.exception
    return " ".join(found.output.split())


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ("dlq list trajectory", "There is no topic 'trajectory'", "Known: requests"),
        ("dlq show trajectory 3", "There is no topic 'trajectory'", "Known: requests"),
        ("dlq show trajectories three", "Invalid value for 'offset'", "--help"),
        ("dlq discard trajectory --yes", "There is no topic 'trajectory'", "Known: requests"),
        ("dlq redrive steps", "Dead letters of 'steps' are not brought back", "Only those of trajectories"),
        ("dlq redrive trajectories --reason bad", "There is no reason 'bad'", "Reasons are bad_magic"),
        ("dlq redrive trajectories --mend mends.py", "'mends.py' names no function", "Write file.py:function"),
        ("dlq redrive trajectories --mend mends.py:shorten --rate nan", "--rate", ""),
        ("dlq redrive trajectories --rate inf", "--rate inf is no number", "Leave it out"),
        ("kafka up --port 99999", "Invalid value for '--port'", "--help"),
        ("kafka up --brokers 2", "1 or 3 brokers, not 2", "a quorum"),
        ("kafka up --brokers 3 --port 9092 --port 9092 --port 9092", "need 3 different port(s)", "free ones are chosen"),
        ("topics apply --reason tired", "needs --force", "Add --force"),
        ("topics plan", "No embedded Kafka is running", "echoswarm kafka up"),
        ("topics render --format word", "'word' is not one of", "--help"),
        ("topics check --target azure", "'azure' is not one of", "--help"),
        ("acls render --config none.toml", "There is no configuration file none.toml", "--config FILE"),
        ("acls render --config empty.toml", "empty.toml: [kafka] bootstrap: is empty", "host:port"),
        ("dlq redrive trajectories --mend mend.py:shorten", "There is no Python file mend.py", "the working folder"),
        ("keys new learner", "'learner' is not one of", "--help"),
        ("keys new worker ../gpu-7", "'../gpu-7' is no name of a worker", "Letters, digits"),
        ("keys show", "There is no file of signers", "echoswarm keys new"),
        ("runs show demo", "No embedded Kafka is running", "echoswarm kafka up"),
        ("runs archive demo --weights none", "'none' is not one of", "--help"),
        ("schemas register", "No registry is configured", "[registry] url"),
        ("tail trajectories --last -5", "Invalid value for '--last'", "--help"),
        ("up --report .", "file '.' is a directory", "--help"),
        ("demo --summary .", "file '.' is a directory", "--help"),
        ("audit --json .", "file '.' is a directory", "--help"),
        ("check --config .", "The configuration file . cannot be read: Is a directory.", ""),
        ("reward new my_rewards.py:class", "'my_rewards.py:class' names no function", "my_rewards.py:brevity"),
        (
            "reward new none/my_rewards.py:brevity",
            "none/my_rewards.py cannot be read or written: No such file or directory.",
            "Name another",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_what_to_do(words: str, says: str, hint: str) -> None:
    said = refused(*words.split())
    assert says in said
    assert hint in said


def test_a_file_in_the_place_of_a_folder_is_named(here: Path) -> None:
    (here / "runs").write_text("")
    assert "cannot be read or written: Not a directory." in refused("demo", "--new")


def test_an_error_of_the_system_without_a_file_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_config: Path | None) -> None:
        raise TimeoutError

    monkeypatch.setattr("echo_ops.cli.acls.read_settings", broken)
    assert isinstance(CliRunner().invoke(app, ["acls", "render"]).exception, TimeoutError)


def test_doctor_says_once_that_there_is_no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Faust leaves itself once it is imported: a module that cannot be looked up.
    monkeypatch.setitem(sys.modules, "faust", ModuleType("faust"))
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == ExitCode.FAILED
    assert found.output.count("No embedded Kafka is running.") == 1


def test_a_key_speaks_for_somebody() -> None:
    assert "'' is no name of a reward" in refused("keys", "new", "reward", "")


def test_signers_that_cannot_be_read_are_not_added_to(here: Path) -> None:
    (here / "signers.toml").write_text("[[signer]]\nrubbish")
    assert "signers.toml is not valid TOML" in refused("keys", "new", "worker")
    assert (here / "signers.toml").read_text() == "[[signer]]\nrubbish"
    assert not (here / "keys").exists()


def test_a_folder_of_keys_that_is_a_file_is_named_and_nobody_is_trusted(here: Path) -> None:
    (here / "keys").write_text("")
    assert "keys cannot be written: File exists." in refused("keys", "new", "worker")
    assert not (here / "signers.toml").exists()


@pytest.mark.parametrize("words", ["kafka status", "kafka up", "topics plan"])
def test_a_state_file_that_cannot_be_read_is_named(here: Path, words: str) -> None:
    (here / "state" / "kafka.json").mkdir(parents=True)
    assert "kafka.json cannot be read" in refused(*words.split())


def test_a_lock_that_cannot_be_opened_is_named(here: Path) -> None:
    (here / "state" / "kafka.lock").mkdir(parents=True)
    assert "kafka.lock cannot be opened: Is a directory" in refused("kafka", "down")


def test_a_kafka_that_runs_on_other_ports_is_not_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = RecordedProcess("Broker 1", 1, "marker")
    state = EmbeddedState("127.0.0.1:9092", None, "/data", num_brokers=1, started_ms=0, processes=(runs,))
    monkeypatch.setattr(detached, "read_state", lambda: state)
    monkeypatch.setattr(EmbeddedState, "running", lambda state: state.processes)
    assert "with other ports is running at 127.0.0.1:9092" in refused("kafka", "up", "--port", "9093")
    assert CliRunner().invoke(app, ["kafka", "up", "--port", "9092"]).exit_code == 0


def test_dashboards_of_a_run_that_is_not_there_say_where_they_look(here: Path) -> None:
    (here / "runs" / "a" / "processes").mkdir(parents=True)
    found = CliRunner().invoke(app, ["monitoring", "render", "--run", "runs/a", "--run", "runs/b"])
    assert found.exit_code == 0, found.output
    assert "Prometheus finds the processes that are in runs/a/processes.\n" in found.output
    assert "runs/b/processes: not there yet; another run's with --config FILE or --run FOLDER." in found.output
