"""A training of TRL's GRPOTrainer leads to the weights of ours, step by step, where both train on the same completions: `make oracles`."""

from __future__ import annotations

import pytest

from tests.oracles.trl_training import apart, settings_of, train_ours, train_trl

_STEPS = 3


# TRL adds 1e-4 to the deviation of a group, we 1e-6; without the deviation nothing differs but the order of additions.
@pytest.mark.parametrize("scale_by_std", [False, True])
def test_trl_comes_to_our_weights(scale_by_std: bool) -> None:
    settings = settings_of(0, _STEPS, groups_per_step=16, scale_by_std=scale_by_std)
    ours = train_ours(settings)
    theirs = train_trl(settings, fed=ours)
    assert theirs.rewards == pytest.approx(ours.rewards, abs=1e-5)
    assert apart(ours.weights, theirs.weights, _STEPS) < 1e-3
    # Of another step's weights it is far more.
    assert apart(ours.weights, theirs.weights[1:], _STEPS - 1) > 0.1
