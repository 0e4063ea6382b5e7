"""A learner that dies at each of its calls to the cluster and at each `fsync` of its checkpoints, one after another; in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from tests.unit.learner.crash_scenario import NUM_STEPS, Death, Scenario, Where


@pytest.mark.slow
@pytest.mark.parametrize("where", Where)
@pytest.mark.parametrize("period", [1, 2])
def test_a_run_survives_a_crash_at_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Where, period: int) -> None:
    for place in ("echo_bus.view._READ_S", "echo_learner.intake._READ_S", "echo_bus.publisher._POLL_S"):
        monkeypatch.setattr(place, 0.003)
    scenario = Scenario(tmp_path, period, monkeypatch)
    num_calls = scenario.num_calls(where)
    assert num_calls > 2 * NUM_STEPS, "the places were not seen"
    for number in range(1, num_calls + 1):
        pipeline = scenario.make()
        try:
            scenario.assert_as_if_nothing_had_happened(pipeline, scenario.train(pipeline, [Death(where, number)]))
        except BaseException as exc:
            exc.add_note(f"The first learner died at {where} {number} of {num_calls}.")
            raise
