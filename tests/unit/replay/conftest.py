"""A sound run in memory, made once, and copies of it in which one record is another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.replay.forged import SoundRun


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SoundRun]:
    """Trained, stale, duplicate, unreadable, open, evaluated, probed, offline and other runs' records; restarted once."""
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
        patch.setattr("os.fsync", lambda descriptor: None)
        yield make_sound_run(tmp_path_factory.mktemp("sound"))


@pytest.fixture(autouse=True)
def _no_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory everything is there at once."""
    monkeypatch.setattr("echo_replay.raw_log._GATHER_S", 0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners' threads look up often enough to end at once."""
    for place in (
        "echo_bus.reading.view._READ_S",
        "echo_learner.intake._READ_S",
        "echo_bus.client.publisher._POLL_S",
        "echo_learner.learner._WAIT_S",
    ):
        monkeypatch.setattr(place, 0.003)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
