"""Why a JVM died, read from its exit code and its last log lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echo_embedded.process import DeathCause, ProcessDied, cause_of_death


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("java.net.BindException: Address already in use", DeathCause.PORT_TAKEN),
        ("KafkaException: Failed to acquire lock on file .lock in /data", DeathCause.FOLDER_IN_USE),
        ("java.lang.RuntimeException: Invalid cluster.id in: /data/meta.properties", DeathCause.FOREIGN_DATA),
        ("java.io.IOException: No space left on device", DeathCause.DISK_FULL),
        ("java.lang.UnsupportedClassVersionError: kafka/Kafka", DeathCause.OLD_JAVA),
        ("Could not reserve enough space for 1048576KB object heap", DeathCause.NO_MEMORY),
        ("There is insufficient memory for the Java Runtime Environment to continue.", DeathCause.NO_MEMORY),
        ("java.lang.OutOfMemoryError: unable to create native thread: possibly out of memory", DeathCause.NO_MEMORY),
        ("Terminating due to java.lang.OutOfMemoryError: Java heap space", DeathCause.SMALL_HEAP),
        ("something else", DeathCause.UNKNOWN),
    ],
)
def test_the_log_says_the_cause(line: str, cause: DeathCause) -> None:
    assert cause_of_death(1, ["INFO starting", line, "\tat a.b.C(C.java:1)"]) is cause


def test_a_kill_without_words_is_a_kill() -> None:
    assert cause_of_death(-9, ["INFO running"]) is DeathCause.KILLED


def test_the_message_shows_the_end_of_the_log_without_stack_frames_and_says_what_to_do() -> None:
    lines = [f"line {index}" for index in range(100)] + ["Address already in use"] + ["\tat a.b.C(C.java:1)"] * 50
    error = ProcessDied("Broker 1", 1, lines)
    text = str(error)
    assert error.cause is DeathCause.PORT_TAKEN
    assert text.startswith("Broker 1 ended with exit code 1: its port is taken.")
    assert "Address already in use" in text
    assert "C.java" not in text
    assert "line 10\n" not in text
    assert text.endswith("Stop what listens there, or let the ports be chosen.")


def test_a_silent_death_is_still_a_sentence() -> None:
    assert str(ProcessDied("Broker 1", 3, [])) == "Broker 1 ended with exit code 3: the reason is in its log."


def test_who_starts_a_process_that_is_to_outlive_it_ends_without_a_word(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from echo_embedded.process import JavaProcess

with open({str(tmp_path / "lock")!r}, "w") as lock:
    process = JavaProcess("sleeper", ["sleep", "60"], Path({str(tmp_path / "log")!r}), lock=lock)
    process.start(None)
    print(process.pid)
"""
    found = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    os.kill(int(found.stdout), signal.SIGKILL)
    assert found.stderr == ""
