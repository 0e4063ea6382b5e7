"""The server that a worker starts ends with it, and with all its processes, however the worker ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from echo_bus.clock import Deadline
from echo_rollout.engines import openai_server
from echo_rollout.engines.openai_server import ServerProcess
from echo_schemas.records import WeightKind

_ROOT = Path(__file__).parents[3]
_WAIT_S = 60.0


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_ROOT)
    monkeypatch.setattr(openai_server, "_MODULE", "tests.integration.engines.fake_api_server")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = Deadline.after(_WAIT_S)
    while not condition():
        assert not deadline.expired(), f"waited until {what}"
        threading.Event().wait(0.02)


def is_gone(pid: int) -> bool:
    """No such process, or one that is only waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def pids_in(file: Path) -> list[int]:
    wait_until(file.exists, "the server is up")
    return [int(pid) for pid in file.read_text().split()]


def test_it_listens_on_loopback_and_close_ends_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "_END_S", 5.0)
    server = ServerProcess({"pids": str(tmp_path / "pids")}, WeightKind.LORA)
    server.start()
    pids = pids_in(tmp_path / "pids")
    assert server._popen is not None
    assert server._popen.pid == pids[0]
    assert server.ended() == ""
    assert server.url.startswith("http://127.0.0.1:")

    def answers() -> bool:
        try:
            return httpx.get(f"{server.url}/health", trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    wait_until(answers, "it answers")
    asyncio.run(server.close())
    wait_until(lambda: all(map(is_gone, pids)), "its processes are gone, the stubborn one too")
    asyncio.run(server.close())


def test_one_that_dies_says_its_exit_code(tmp_path: Path) -> None:
    server = ServerProcess({"dies": 3}, WeightKind.LORA)
    server.start()
    wait_until(lambda: bool(server.ended()), "it has ended")
    assert "has ended with exit code 3" in server.ended()
    asyncio.run(server.close())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_a_worker_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    owner = [sys.executable, "-m", "tests.integration.engines.owner", str(file)]
    assert subprocess.run(owner, cwd=_ROOT, env=dict(os.environ), timeout=_WAIT_S, check=False).returncode == -9
    pids = pids_in(file)
    wait_until(lambda: all(map(is_gone, pids)), "the guard has ended both")
