"""The learning rate's schedule, by its formula and by its ends."""

from __future__ import annotations

import pytest

from echo_learner.training.learning_rate import LearningRate


def test_a_constant_rate_rises_and_stays() -> None:
    rate = LearningRate(lr=4e-3, warmup_steps=4)
    assert [rate.at(update) for update in (1, 2, 4, 5, 10_000)] == [1e-3, 2e-3, 4e-3, 4e-3, 4e-3]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_falling_rate_has_all_of_lr_after_the_warm_up_and_min_lr_after_the_decay(schedule: str, warmup: int) -> None:
    rate = LearningRate(lr=4e-3, warmup_steps=warmup, schedule=schedule, decay_steps=13, min_lr=1e-3)
    rates = [rate.at(update) for update in range(warmup + 1, 15)]
    assert rates[0] == 4e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-2] > 1e-3, "the last update of the decay still has more"
    assert rates[-1] == rate.at(1_000) == pytest.approx(1e-3)


def test_half_way_a_falling_rate_is_half_way() -> None:
    for schedule in ("linear", "cosine"):
        assert LearningRate(lr=3e-3, schedule=schedule, decay_steps=8, min_lr=1e-3).at(5) == pytest.approx(2e-3)


def test_a_cosine_is_flat_at_its_ends() -> None:
    linear, cosine = (LearningRate(lr=1.0, schedule=schedule, decay_steps=100) for schedule in ("linear", "cosine"))
    assert cosine.at(11) > linear.at(11)
    assert cosine.at(91) < linear.at(91)
    assert 0 < cosine.at(100) < linear.at(100)
