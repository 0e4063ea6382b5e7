"""Settings that a worker or feeder cannot serve: one sentence, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from echo_bus.clock import SystemClock
from echo_rollout.run import run_feeder, run_worker
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal
from echo_schemas.errors import UserError
from echo_settings import Settings
from tests.integration.rollout.parts import write_base
from tests.unit.rollout.conftest import MakeSwarm

MakeProcess = Callable[..., RoleProcess]


@pytest.fixture
def make_process(make_swarm: MakeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProcess:
    """A role's process over the in-memory cluster; sections of settings as keyword arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = write_base(tmp_path / "base")

    def make(**sections: dict[str, Any]) -> RoleProcess:
        swarm = make_swarm()
        registry, clock = CollectorRegistry(), SystemClock()
        settings = {
            "run": {"name": "demo"},
            "task": {"name": "tests.unit.rollout.swarm:LetterTask"},
            "policy": {"base": str(base), "max_length": 64},
            "rollout": {"engine": "tests.integration.rollout.parts:PacedEngine"},
            **sections,
        }
        return RoleProcess(
            settings=Settings.model_validate(settings),
            bus=swarm.bus,
            registry=registry,
            places=PlaceTimes(registry, clock),
            clock=clock,
            stop=StopSignal(),
        )

    return make


@pytest.mark.parametrize(
    ("sections", "sentence", "instead"),
    [
        ({"rollout": {"engine": "vlm"}}, "There is no engine 'vlm'.", "Did you mean 'vllm'?"),
        ({"rollout": {"engine": "no.such.module:Engine"}}, "no module 'no'", ""),
        ({"rollout": {"engine": "tests.integration.rollout.parts:Nothing"}}, "'Nothing'", ""),
        ({"task": {"name": "reverse-digit"}}, "'reverse-digit'", "reverse-digits"),
        ({"policy": {"base": "/no/such/folder"}}, "/no/such/folder", ""),
    ],
)
def test_a_worker_that_cannot_be_what_the_settings_say_says_so(
    make_process: MakeProcess, sections: dict[str, dict[str, Any]], sentence: str, instead: str
) -> None:
    with pytest.raises(UserError) as caught:
        run_worker(make_process(**sections), worker_id="w0")
    assert sentence in caught.value.message
    assert instead in (caught.value.hint or "")
    assert "\n" not in caught.value.message


def test_a_feeder_names_the_task_that_was_meant(make_process: MakeProcess) -> None:
    with pytest.raises(UserError, match="reverse-digit") as caught:
        run_feeder(make_process(task={"name": "reverse-digit"}))
    assert "reverse-digits" in (caught.value.hint or "")


def test_a_feeder_has_no_part_in_sequential_mode(make_process: MakeProcess) -> None:
    with pytest.raises(UserError, match="sequential mode"):
        run_feeder(make_process(run={"name": "demo", "mode": "sequential"}))


def test_a_worker_that_is_stopped_before_any_weights_leaves_cleanly(make_process: MakeProcess) -> None:
    process = make_process()
    process.stop.set()
    run_worker(process, worker_id="w0")
