"""The first signal drains, the second ends the process, as does the limit; afterwards everything is as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from echo_bus.clock import Deadline
from echo_runtime.signals import drain_on_signals

WAIT_S = 60.0
# A main thread that hears nothing: it is inside one native call, which keeps the interpreter's lock or gives it up.
_BUSY = """
import ctypes, sys, time
from echo_runtime.signals import drain_on_signals
sleep = (ctypes.PyDLL if sys.argv[1] == "holding" else ctypes.CDLL)(None).sleep
with drain_on_signals(lambda: None, limit_s=float(sys.argv[2])):
    print("busy", flush=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        sleep(60)
"""


def test_the_first_signal_drains_and_the_second_exits() -> None:
    stops: list[threading.Thread] = []
    stopped = threading.Event()
    exits: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        stops.append(threading.current_thread())
        stopped.set()

    with drain_on_signals(stop, exit_now=exits.append):
        signal.raise_signal(signal.SIGTERM)
        assert stopped.wait(WAIT_S), "waited for the drain"
        assert exits == []
        signal.raise_signal(signal.SIGINT)
        assert exits == [128 + signal.SIGINT]
    (thread,) = stops
    assert thread is not threading.current_thread(), "the interrupted thread may hold the lock that `stop` needs"
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_drain_that_passes_its_limit_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **options: None)
    ended = threading.Event()
    exits: list[int] = []

    def exit_now(code: int) -> None:
        exits.append(code)
        ended.set()

    with drain_on_signals(lambda: None, limit_s=0.05, exit_now=exit_now):
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(WAIT_S), "waited for the limit"
    assert exits == [128 + signal.SIGTERM]


def _busy(kind: str, limit_s: float) -> subprocess.Popen[str]:
    # Started with the signal's default action, whatever this process does with it.
    process = subprocess.Popen([sys.executable, "-c", _BUSY, kind, str(limit_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


def test_a_second_signal_ends_a_process_whose_main_thread_hears_nothing() -> None:
    with _busy("giving", WAIT_S) as process:
        deadline = Deadline.after(WAIT_S)
        while process.poll() is None and not deadline.expired():
            # A signal that comes while the first is not yet delivered is merged with it.
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM


def test_the_limit_ends_a_process_even_if_no_python_can_run() -> None:
    with _busy("holding", 0.1) as process:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(WAIT_S) != 0
        assert process.stderr is not None
        assert "most recent call first" not in process.stderr.read(), "every thread's stack, of a process that was asked to end"
