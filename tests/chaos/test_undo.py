"""A test run that is killed leaves no disk and no network behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from tests.chaos.disk import SmallDisk
from tests.chaos.network import Namespace
from tests.chaos.undo import Undo

_WITHIN_S = 60.0
_SUBNET = 251
_HOLDER = """
import sys, time
from pathlib import Path
from tests.chaos.disk import SmallDisk
from tests.chaos.network import Namespace
with SmallDisk(Path(sys.argv[1]), 1), Namespace(sys.argv[2], int(sys.argv[3])):
    print("held", flush=True)
    time.sleep(600)
"""


def wait_until_gone(is_there: Callable[[], bool], what: str) -> None:
    deadline, never = Deadline.after(_WITHIN_S), threading.Event()
    while is_there():
        assert not deadline.expired(), f"waited until {what} is gone"
        never.wait(0.02)


def test_every_command_is_run_once_whatever_the_others_do(tmp_path: Path) -> None:
    undo = Undo(("false",), ("mkdir", str(tmp_path / "it's done")), ("mkdir", str(tmp_path / "and this")))
    assert list(tmp_path.iterdir()) == []
    undo.run()
    undo.run()
    assert {each.name for each in tmp_path.iterdir()} == {"it's done", "and this"}


def test_a_killed_process_leaves_neither_a_mount_nor_a_network(tmp_path: Path) -> None:
    if why := SmallDisk.why_not(tmp_path) or Namespace.why_not():
        pytest.skip(why)
    folder, tag = tmp_path / "disk", f"eu{os.getpid():x}"[-8:]
    command = [sys.executable, "-c", _HOLDER, str(folder), tag, str(_SUBNET)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert os.path.ismount(folder)
        network = Path("/run/netns") / f"{tag}-ns"
        assert network.exists()
        holder.kill()
    wait_until_gone(network.exists, "the network")
    wait_until_gone((Path("/sys/class/net") / f"{tag}-br").exists, "its bridge")
    wait_until_gone(lambda: os.path.ismount(folder), "the disk")
