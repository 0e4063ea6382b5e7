"""Which roles wait for what before they begin: nobody joins a group or fences anybody in a namespace of another run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.metrics import BusMetrics
from echo_memory import MemoryCluster
from echo_ops.cli import run
from echo_ops.roles import ROLES, Flags, Role, RoleEntry, arguments_of
from echo_runtime.ownership import START_VARIABLE
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.roles import load_roles
from echo_settings import Settings


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
        ("coordinator", "", True),
    ],
)
def test_a_role_looks_whose_the_namespace_is(monkeypatch: pytest.MonkeyPatch, role: str, start: str, waits: bool | None) -> None:
    asked: list[bool] = []
    begun: list[str] = []

    @contextmanager
    def open_role(settings: Settings, role: str, *, start: str, **_: Any) -> Iterator[RoleProcess]:
        registry, clock = BusMetrics().registry, SystemClock()
        bus = Bus(cluster=MemoryCluster(), namespace=Namespace("a"), clock=clock, role=role)
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
    monkeypatch.setattr(RoleEntry, "load", lambda *_: lambda process, **_: begun.append(role))
    monkeypatch.setattr(run, "set_up_logs", lambda *_, **__: None)
    run.run_role(role=Role(role))
    assert asked == ([] if waits is None else [waits])
    assert begun == ([role] if waits is None else []), "a role began although its turn had not come"


def test_a_role_gets_its_flags_and_no_others() -> None:
    assert arguments_of(Role.LEARNER, Flags(takeover=True)) == {"takeover": True, "skip": False}
    beside = {"application": "shadow", "names": ["a.py:b"], "beginning": "", "share": 0.5, "ends_with_run": False}
    assert arguments_of(Role.REWARD, Flags(application="shadow", names=["a.py:b"], share=0.5)) == beside
    assert arguments_of(Role.FEEDER, Flags()) == {}


@pytest.mark.parametrize(
    ("role", "flags", "says", "whose"),
    [
        (Role.WORKER, Flags(takeover=True), "`echoswarm run worker` takes no --takeover.", "learner"),
        (Role.LEARNER, Flags(kind="fast"), "`echoswarm run learner` takes no --kind.", "worker"),
        (Role.FEEDER, Flags(names=["exact"]), "`echoswarm run feeder` takes no --reward.", "reward"),
        (Role.REWARD, Flags(skip=True), "`echoswarm run reward` takes no --skip.", "learner"),
        (Role.WORKER, Flags(ends_with_run=True), "`echoswarm run worker` takes no --ends-with-run.", "reward"),
        (Role.LEARNER, Flags(share=0.1), "`echoswarm run learner` takes no --sample.", "reward"),
    ],
)
def test_a_flag_of_another_role_is_refused(role: Role, flags: Flags, says: str, whose: str) -> None:
    with pytest.raises(UserError) as caught:
        arguments_of(role, flags)
    assert (caught.value.message, caught.value.hint) == (says, f"It belongs to `echoswarm run {whose}`.")


def test_every_role_is_declared() -> None:
    assert set(ROLES) == set(Role)
    assert {role.value for role in Role} <= set(load_roles())
