"""A run made in memory once, of which the tests copy the log into a real Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.replay.forged import SoundRun


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> SoundRun:
    """Made in memory, by threads that look up often enough."""
    pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
    from tests.unit.replay.forged import make_sound_run

    with pytest.MonkeyPatch.context() as patch:
        for place in (
            "echo_bus.reading.view._READ_S",
            "echo_learner.intake._READ_S",
            "echo_bus.client.publisher._POLL_S",
            "echo_learner.learner._WAIT_S",
        ):
            patch.setattr(place, 0.003)
        return make_sound_run(tmp_path_factory.mktemp("sound"))
