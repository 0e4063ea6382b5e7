"""The simulated world tells a task that waits for the real one."""

from __future__ import annotations

import threading

import pytest

from tests.model import simulation as module
from tests.model.simulation import Deadlock, Process, Simulation


def test_a_task_that_waits_for_the_machine_ends_the_test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STUCK_S", 0.05)
    simulation, real = Simulation(), threading.Event()
    simulation.spawn(Process("learner-0"), "reader", real.wait)
    with pytest.raises(Deadlock, match="learner-0/reader waits for something that is not simulated"):
        simulation.block(1.0, "the reader")
    real.set()
