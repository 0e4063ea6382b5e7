"""The disk of the model: what was forced stays, what was not may be gone or torn, and every operation is a place to die."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.disk import Disk, Loss, Mounted, mounted
from tests.model.simulation import Crash, Process, Simulation


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path, Simulation())
    with mounted():
        Mounted.disk = found
        yield found
        Mounted.disk = None


def force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def without_power(disk: Disk, loss: Loss) -> None:
    Mounted.disk = None
    disk.lose_power(loss)
    Mounted.disk = disk


def test_what_was_forced_stays_and_its_name_with_the_folder(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"kept")
    (tmp_path / "b").write_bytes(b"nameless")
    force(tmp_path / "a")
    force(tmp_path)
    force(tmp_path / "b")
    (tmp_path / "c").mkdir()
    without_power(disk, Loss.EVERYTHING)
    assert (tmp_path / "a").read_bytes() == b"kept"
    assert (tmp_path / "b").read_bytes() == b"nameless"
    assert not (tmp_path / "c").exists()


def test_a_name_may_outlive_its_bytes(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"whole")
    without_power(disk, Loss.CONTENTS)
    assert (tmp_path / "a").read_bytes() == b"wh"


def test_a_rename_that_was_not_forced_has_not_happened(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"whole")
    force(tmp_path / "a")
    force(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    without_power(disk, Loss.EVERYTHING)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_process_may_die_in_the_middle_of_a_write(tmp_path: Path) -> None:
    simulation = Simulation()
    disk = Disk(tmp_path, simulation)

    def dies_at_the_write(process: Process, operation: str) -> None:
        if operation == "disk write":
            simulation.kill(process)

    process = Process("writer", before_call=dies_at_the_write)
    with mounted():
        Mounted.disk = disk
        task = simulation.spawn(process, "writer", lambda: (tmp_path / "a").write_bytes(b"whole"))
        simulation.join(task)
        Mounted.disk = None
    assert process.calls == ["disk create", "disk write"]
    assert (tmp_path / "a").read_bytes() == b"wh"


def test_a_dead_process_changes_nothing_any_more(tmp_path: Path) -> None:
    simulation = Simulation()
    process = Process("writer")

    def writes_on() -> None:
        try:
            simulation.block(1.0, "nothing")
        except Crash:
            (tmp_path / "a").write_bytes(b"from beyond")

    with mounted():
        Mounted.disk = Disk(tmp_path, simulation)
        task = simulation.spawn(process, "writer", writes_on)
        simulation.block(0.5, "the writer to begin")
        simulation.kill(process)
        simulation.join(task)
        Mounted.disk = None
    assert not list(tmp_path.iterdir())
