"""A run that a learner made is proved sound, whatever it went through."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_replay.audit import audit_run
from echo_replay.verdicts import Verdict
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP
from tests.unit.replay.forged import STEPS_TRAINED, SoundRun


def test_every_promise_of_a_run_that_was_restarted_is_proved(sound: SoundRun) -> None:
    report = sound.audit()
    assert {finding.promise: (finding.examples, finding.gaps) for finding in report.findings if finding.verdict is not Verdict.PROVED} == {}
    assert report.verdict is Verdict.PROVED
    assert report.num_steps == STEPS_TRAINED
    assert report.counts == {
        "trained": STEPS_TRAINED * GROUPS_PER_STEP * GROUP_SIZE,
        "dropped": 4,
        "dead-lettered": 1,
        "open": 4,
        "not_for_training": 3,
        "not_ours": 0,
        "unaccounted": 0,
    }


def test_a_copy_of_its_log_is_as_sound(sound: SoundRun, tmp_path: Path) -> None:
    assert audit_run(sound.forge(tmp_path / "copy").bus, "demo").verdict is Verdict.PROVED
