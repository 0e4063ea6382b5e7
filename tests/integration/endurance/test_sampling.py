"""What a process holds is counted as the kernel and its own metrics say it, its children included."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from echo_runtime.server import MetricsServer
from tests.endurance.sampling import bytes_below, held_by
from tests.endurance.watch import sizes_of_partitions

_HELD_MIB = 20
_CHILD = "import sys; held = bytearray(b'1') * (20 << 20); print('ready', flush=True); sys.stdin.read()"


def test_memory_files_threads_and_series_of_a_process_and_its_children(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("held", "Of this test.", ["what"], registry=registry)
    gauge.labels("one")
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    with MetricsServer(registry) as server, ExitStack() as stack:
        before = held_by(os.getpid(), server.url)
        assert before.series == frozenset({'held{what="one"}'})
        gauge.labels("two")
        for number in range(10):
            stack.enter_context((tmp_path / str(number)).open("w"))
        thread.start()
        stack.callback(done.set)
        child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(child.communicate)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        after = held_by(os.getpid(), server.url)
    thread.join()
    assert after.series == frozenset({'held{what="one"}', 'held{what="two"}'})
    # Ours, our ends of two pipes, and the child's own three.
    assert after.files - before.files >= 10 + 2 + 3
    assert after.threads - before.threads >= 2
    assert after.memory_mb - before.memory_mb >= _HELD_MIB
    with pytest.raises(ProcessLookupError):
        held_by(child.pid, server.url)


def test_a_process_that_does_not_answer_has_no_series() -> None:
    assert held_by(os.getpid(), "http://127.0.0.1:1").series is None


def test_a_file_with_two_names_takes_its_place_once_and_logs_are_told_from_indexes(tmp_path: Path) -> None:
    folder = tmp_path / "soak.steps-0"
    folder.mkdir()
    (folder / "00000000000000000042.log").write_bytes(bytes(100))
    (folder / "00000000000000000042.index").write_bytes(bytes(1_000))
    (folder / "00000000000000000050.log").hardlink_to(folder / "00000000000000000042.log")
    (tmp_path / "other-0").mkdir()
    assert bytes_below(tmp_path) == 1_100
    assert sizes_of_partitions(tmp_path, "soak.") == {"soak.steps-0": (100, 42)}
