"""`echoswarm dlq` as a user runs it, on a real broker: killed in the middle, no letter is written twice and none is forgotten."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_bus.bus import Bus
from echo_bus.dead_letters import DeadLetters
from echo_replay.raw_log import RawLog
from echo_runtime.opening import open_bus
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.naming import Namespace
from echo_schemas.topics import TRAJECTORIES
from echo_settings import load_settings
from tests.integration.ops.test_commands import Shell
from tests.unit.schemas.samples import trajectory

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
NUM_LETTERS = 600
MEND = """
def mend(letter):
    return letter.value.removeprefix(b"junk")
"""


@pytest.fixture
def shell(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Shell:
    shell = Shell(tmp_path, ECHO_KAFKA__BOOTSTRAP=kafka_bootstrap, ECHO_KAFKA__NAMESPACE=namespace.name, ECHO_RUN__NAME="demo")
    assert shell("topics", "apply").returncode == 0
    return shell


@pytest.fixture
def bus(shell: Shell) -> Bus:
    """A worker's."""
    return open_bus(load_settings(None, shell.environ), "worker")


def messages(bus: Bus, physical: str) -> Iterator[tuple[bytes | None, bytes | None, dict[str, bytes]]]:
    with RawLog(bus, physical) as log:
        for batch in log.messages():
            yield from ((raw.key(), raw.value(), dict(raw.headers() or ())) for raw in batch)


def let_die(bus: Bus, num_letters: int) -> None:
    """Trajectories with four bytes too many before them, which a reader could not use."""
    publisher, physical = bus.publisher(), bus.namespace.topic(TRAJECTORIES)
    for seq in range(num_letters):
        value = b"junk" + bus.codec.encode(trajectory(seq=seq))
        publisher.publish_bytes(physical, value, key=f"demo/{seq}".encode())
    publisher.close()
    publisher = bus.publisher()
    letters = DeadLetters(publisher, bus, bus.namespace.group("learner"))
    with RawLog(bus, physical) as log:
        for batch in log.messages():
            for raw in batch:
                letters.send(raw, TRAJECTORIES, InvalidRecord(InvalidReason.BAD_MAGIC, "It begins with junk."))
    publisher.close()


def waiting(shell: Shell) -> int:
    (heap,) = json.loads(shell("dlq", "list", "trajectories", "--since", "1h", "--json").stdout)
    return int(heap["waiting"])


def test_letters_are_listed_shown_mended_and_brought_back_once_though_the_command_is_killed(shell: Shell, bus: Bus) -> None:
    let_die(bus, NUM_LETTERS)
    listed = shell("dlq", "list")
    assert "600" in listed.stdout, listed
    assert "bad_magic" in listed.stdout
    assert "No such dead letters" in shell("dlq", "list", "--until", "1h").stdout
    shown = shell("dlq", "show", "trajectories", "0")
    assert "It begins with junk." in shown.stdout, shown
    refused = shell("dlq", "redrive", "trajectories", "--yes")
    assert refused.returncode == 1
    assert "before the letter 0" in refused.stderr
    (shell.folder / "mends.py").write_text(MEND)
    planned = shell("dlq", "redrive", "trajectories", "--mend", "mends.py:mend")
    assert "write again" in planned.stdout, planned
    assert "Nothing was written" in planned.stdout
    assert waiting(shell) == NUM_LETTERS

    command = [str(Path(sys.executable).parent / "echoswarm"), "dlq", "redrive", "trajectories", "--mend", "mends.py:mend", "--yes"]
    for end in (signal.SIGINT, signal.SIGKILL):
        before = waiting(shell)
        # All of them would take five minutes, far longer than it takes to see the first ones written.
        redrive = subprocess.Popen([*command, "--rate", "2"], cwd=shell.folder, env=shell.environ, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + WAIT_S
        while not 0 < before - waiting(shell) < before:
            assert time.monotonic() < deadline
            assert redrive.poll() is None
        redrive.send_signal(end)
        _, said = redrive.communicate(timeout=WAIT_S)
        if end is signal.SIGINT:
            assert redrive.returncode == 130
            assert "the same command goes on behind these" in said
    assert 0 < waiting(shell) < NUM_LETTERS
    done = shell("dlq", "redrive", "trajectories", "--mend", "mends.py:mend", "--yes")
    assert "written again" in done.stdout, done

    back = Counter(key for key, _, headers in messages(bus, bus.namespace.topic(TRAJECTORIES)) if "echo-redriven-from" in headers)
    assert back == {f"demo/{seq}".encode(): 1 for seq in range(NUM_LETTERS)}
    assert waiting(shell) == 0
    assert "Nothing" in shell("dlq", "discard", "trajectories").stdout


def test_mistakes_are_sentences(shell: Shell) -> None:
    assert "No dead letters" in shell("dlq", "list").stdout
    assert "There is no topic 'trajectory'" in shell("dlq", "show", "trajectory").stderr
    assert "are not brought back" in shell("dlq", "redrive", "steps").stderr
    assert "There is no reason 'bad'" in shell("dlq", "redrive", "trajectories", "--reason", "bad").stderr
    assert "has no dead letters" in shell("dlq", "show", "trajectories").stderr
