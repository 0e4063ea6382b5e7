"""A learner that has no room for rewards of unread trajectories: it reads them again, also after a fault at any call."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_core.groups import AssemblyLimits
from echo_learner.back_pressure import BackPressure
from echo_learner.training.config import assembly_limits
from echo_settings import Settings
from tests.model.conftest import MakeScenario
from tests.model.disk import Loss
from tests.model.runs import Fate, Fault
from tests.model.scenarios import PLAYS
from tests.thorough import IS_THOROUGH

# Of so many calls one is tried.
_EACH = {Fate.KILL: 17, Fate.PAUSE: 61}


@pytest.fixture
def num_times_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One reward has room. Returns how many partitions were gone back in, each time."""
    go_back = BackPressure.go_back
    found: list[int] = []

    def narrow(settings: Settings) -> AssemblyLimits:
        return replace(assembly_limits(settings), max_early_rewards=1)

    def counted(pressure: BackPressure, wanted: dict[int, int]) -> None:
        found.append(len(wanted))
        go_back(pressure, wanted)

    monkeypatch.setattr("echo_learner.parts.assembly_limits", narrow)
    monkeypatch.setattr(BackPressure, "go_back", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fate", _EACH, ids=lambda fate: fate.name.lower())
def test_a_learner_with_little_room_trains_the_same_whatever_befalls_it(
    scenario: MakeScenario, num_times_back: list[int], fate: Fate
) -> None:
    model = scenario("asynchronous", 2)
    assert sum(num_times_back) > 0, "rewards were never read again"
    numbers = range(1, len(model.calls) + 1) if fate is Fate.PAUSE else model.effects
    each = 1 if IS_THOROUGH else _EACH[fate]
    for number in numbers[3 % each :: each]:
        fault = Fault(fate, number, Loss.EVERYTHING, seed=number)
        with model.run(fault=fault, call=model.calls[number - 1]) as run:
            PLAYS[fate](run, fault)
            model.assert_as_ever(run)
