"""One fault at every call that a learner makes to the cluster or the disk: it dies there, with or without the power, or sleeps there.

A share of the calls is tried, the largest where a step is published each time; a thorough run tries them all (minutes).
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from tests.model.conftest import MakeScenario
from tests.model.disk import Loss
from tests.model.runs import Fate, Fault
from tests.model.scenarios import PLAYS
from tests.thorough import IS_THOROUGH

_KINDS = [("asynchronous", 1), ("asynchronous", 2), ("asynchronous", 3), ("asynchronous", 4), ("sequential", 1)]
# Of so many calls one is tried.
_EACH: dict[tuple[str, int], dict[Fate, int]] = {
    ("asynchronous", 1): {Fate.KILL: 5, Fate.POWER: 5, Fate.PAUSE: 9, Fate.FENCE: 13},
    ("asynchronous", 2): {Fate.KILL: 17, Fate.POWER: 17, Fate.PAUSE: 31, Fate.FENCE: 41},
    ("asynchronous", 3): {Fate.KILL: 29, Fate.POWER: 29, Fate.PAUSE: 61, Fate.FENCE: 67},
    ("asynchronous", 4): {Fate.KILL: 37, Fate.POWER: 37, Fate.PAUSE: 71, Fate.FENCE: 79},
    ("sequential", 1): {Fate.KILL: 17, Fate.POWER: 17, Fate.PAUSE: 31, Fate.FENCE: 41},
}
# Calls before the weights are linked and after the drops are committed.
_AROUND = 10
_EACH_OF_DROPS = {Fate.KILL: 3, Fate.POWER: 3, Fate.PAUSE: 7, Fate.FENCE: 5}


@pytest.mark.slow
@pytest.mark.parametrize("fate", Fate, ids=lambda fate: fate.name.lower())
@pytest.mark.parametrize(("mode", "kappa"), _KINDS)
def test_a_learner_may_meet_a_fault_at_every_call(scenario: MakeScenario, mode: str, kappa: int, fate: Fate) -> None:
    model = scenario(mode, kappa)
    each = 1 if IS_THOROUGH else _EACH[mode, kappa][fate]
    numbers = range(1, len(model.calls) + 1) if fate is Fate.PAUSE else model.effects
    assert len(numbers) > 100, "the calls were not seen"
    for number in numbers[kappa % each :: each]:
        losses = list(Loss) if fate is Fate.POWER else [Loss.EVERYTHING]
        for loss in losses if IS_THOROUGH else losses[number % len(losses) :][:1]:
            fault = Fault(fate, number, loss, seed=number)
            with model.run(fault=fault, call=model.calls[number - 1]) as run:
                PLAYS[fate](run, fault)
                model.assert_as_ever(run)


@pytest.mark.slow
@pytest.mark.parametrize("fate", Fate, ids=lambda fate: fate.name.lower())
@pytest.mark.parametrize("kappa", [1, 2])
def test_a_learner_may_meet_a_fault_while_drops_go_without_a_step(scenario: MakeScenario, kappa: int, fate: Fate) -> None:
    """With kappa 2 a report waits for its snapshot meanwhile."""
    model = scenario("asynchronous", kappa, late=True)
    linked = model.calls.index("disk link") + 1
    committed = next(number for number, call in enumerate(model.calls, 1) if number > linked and call == "commit_transaction")
    numbers = range(1, len(model.calls) + 1) if fate is Fate.PAUSE else model.effects
    numbers = [number for number in numbers if linked - _AROUND < number < committed + _AROUND]
    assert len(numbers) > 20, "the calls were not seen"
    each = 1 if IS_THOROUGH else _EACH_OF_DROPS[fate]
    for number in numbers[kappa % each :: each]:
        loss = list(Loss)[number % len(Loss)] if fate is Fate.POWER else Loss.EVERYTHING
        fault = Fault(fate, number, loss, seed=number)
        with model.run(fault=fault, call=model.calls[number - 1]) as run:
            PLAYS[fate](run, fault)
            model.assert_as_ever(run)
