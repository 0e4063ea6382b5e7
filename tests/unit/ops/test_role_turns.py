"""Which roles wait for what before they begin: nobody joins a group or fences anybody in a namespace of another run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.memory import MemoryCluster
from echo_bus.metrics import BusMetrics
from echo_bus.ownership import START_VARIABLE
from echo_bus.places import PlaceTimes
from echo_bus.process import RoleProcess, StopSignal
from echo_bus.settings import Settings
from echo_ops.cli import run
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace


@pytest.mark.parametrize(
    ("role", "start", "waits"),
    [
        ("learner", "", None),
        ("learner", "b7", None),
        ("worker", "b7", False),
        ("reward", "", False),
        ("reward", "b7", True),
        ("feeder", "", True),
        ("offline", "", True),
    ],
)
def test_a_role_looks_whose_the_namespace_is(monkeypatch: pytest.MonkeyPatch, role: str, start: str, waits: bool | None) -> None:
    asked: list[bool] = []
    begun: list[str] = []

    @contextmanager
    def open_role(settings: Settings, role: str, *, start: str, **_: Any) -> Iterator[RoleProcess]:
        registry, clock = BusMetrics().registry, SystemClock()
        bus = Bus(cluster=MemoryCluster(), namespace=Namespace("a"), codec=lock_file_codec(), metrics=BusMetrics(), clock=clock, role=role)
        yield RoleProcess(
            settings=settings, bus=bus, registry=registry, places=PlaceTimes(registry, clock), clock=clock, stop=StopSignal(), start=start
        )  # fmt: skip

    def await_turn(process: RoleProcess, *, needs_learner: bool) -> bool:
        assert process.start == start
        asked.append(needs_learner)
        return False

    monkeypatch.setenv(START_VARIABLE, start)
    monkeypatch.setattr(run, "open_role", open_role)
    monkeypatch.setattr(run, "await_turn", await_turn)
    monkeypatch.setattr(run, "wait_for_topics", lambda *_: True)
    monkeypatch.setattr(run, "import_entry", lambda *_: lambda process, **_: begun.append(role))
    monkeypatch.setattr(run, "log_to", lambda file: None)
    run.run_role(role, None, name=None, announce=None, log_file=None)
    assert asked == ([] if waits is None else [waits])
    assert begun == ([role] if waits is None else []), "a role began although its turn had not come"
