"""Who sent a SIGKILL: memory is blamed only where the kernel's counters have risen."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_embedded.memory import OutOfMemoryWatch


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A control group of version 2 below the root, and the machine's counter."""
    (tmp_path / "own").write_text("4:memory:/a\n0::/b/c\n")
    for file, count in (("vmstat", 3), ("b/c/memory.events", 0), ("memory/a/memory.oom_control", 0)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"low 0\noom_kill {count}\noom 7\n")
    return tmp_path


def watch(machine: Path) -> OutOfMemoryWatch:
    return OutOfMemoryWatch(machine, machine / "own", machine / "vmstat")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("b/c/memory.events", "Its memory limit (control group) was reached"),
        ("memory/a/memory.oom_control", "Its memory limit (control group) was reached"),
        ("vmstat", "The machine ran out of memory"),
        (None, "Another process sent it"),
    ],
)
def test_only_a_counter_that_rises_is_evidence(machine: Path, file: str | None, said: str) -> None:
    made = watch(machine)
    if file is not None:
        (machine / file).write_text("low 0\noom_kill 4\n")
    assert made.verdict().startswith(said)


def test_without_counters_nothing_is_claimed(tmp_path: Path) -> None:
    assert "not known" in watch(tmp_path).verdict()
