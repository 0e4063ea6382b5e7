"""Learners that die anywhere, any number of times in a row: the run ends as if nothing had happened. Every single place: see
tests/integration/learner/test_every_crash.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from tests.unit.learner.crash_scenario import Death, Scenario, Where

# More than any of the three makes in a run; what lies above is a learner that does not die.
_MAX_CALLS = 45
_DEATHS = st.lists(st.builds(Death, st.sampled_from(Where), st.integers(1, _MAX_CALLS)), min_size=1, max_size=3)


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize("period", [1, 2])
def test_a_run_survives_any_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    scenario = Scenario(tmp_path, period, monkeypatch)

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(_DEATHS)
    def survives(deaths: list[Death]) -> None:
        pipeline = scenario.make()
        scenario.assert_as_if_nothing_had_happened(pipeline, scenario.train(pipeline, deaths))

    survives()
