"""Learners from their first claim to their last commit, in memory: steps, crashes, restarts, take-overs, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.training.batch import TrainingBatch
from echo_learner.training.trainer import TrainingDiverged, TrainResult
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, SessionClaim
from echo_schemas.topics import PROGRESS, STEPS
from tests.unit.learner.crash_point import Crash
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill

pytestmark = pytest.mark.slow

CLAIM_AND_VERSION_0 = 2
"""Commits before the first step's."""


def is_commit(operation: str) -> bool:
    return operation == "commit_transaction"


def test_three_steps_from_groups_to_reports_snapshots_and_checkpoints(pipeline: Pipeline) -> None:
    fill(pipeline, 3)
    trainer = NumpyTrainer()
    metrics = pipeline.train(trainer, steps=3)
    reports = pipeline.reports()
    assert [report.version for report in reports] == [1, 2, 3]
    (claim,) = pipeline.read(STEPS, SessionClaim)
    assert [report.checkpoint for report in reports] == [f"v{version}-{claim.session}" for version in (1, 2, 3)]
    assert [report.parent for report in reports] == [f"v{version}-{claim.session}" for version in (0, 1, 2)]
    assert [report.staleness_total for report in reports] == [(4,), (0, 4), (0, 0, 4)]
    manifests = pipeline.manifests()
    assert [manifest.version for manifest in manifests] == [0, 1, 2, 3]
    assert [manifest.parent for manifest in manifests] == [None, 0, 1, 2]
    assert [manifest.parent_sha256 for manifest in manifests[1:]] == [manifest.sha256 for manifest in manifests[:-1]]
    assert [report.snapshot_sha256 for report in reports] == [manifest.sha256 for manifest in manifests[1:]]
    assert pipeline.blob(manifests[3]).startswith(trainer.weights)
    assert len(trainer.batches) == 3
    assert metrics.registry.get_sample_value("echo_learner_version") == 3
    assert metrics.registry.get_sample_value("echo_learner_samples_trained_total") == 12
    progress = pipeline.read(PROGRESS, Progress)[-1]
    assert (progress.version, progress.published, progress.groups_trained, progress.next_seq) == (3, 3, 6, 6)
    assert_books(pipeline)


def test_a_run_that_ended_goes_on_with_more_steps(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=2)
    second = NumpyTrainer("second")
    pipeline.train(second, steps=4, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4]
    assert second.weights == uninterrupted(4)
    first_claim, second_claim = pipeline.read(STEPS, SessionClaim)
    assert (second_claim.tip_version, second_claim.tip_checkpoint) == (2, f"v2-{first_claim.session}")
    assert pipeline.reports()[2].parent == f"v2-{first_claim.session}"
    assert pipeline.reports()[3].checkpoint == f"v4-{second_claim.session}"
    assert_books(pipeline)


def test_a_run_that_has_its_steps_ends_at_once(pipeline: Pipeline) -> None:
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2)
    trainer = NumpyTrainer()
    pipeline.train(trainer, steps=2, takeover=True)
    assert not trainer.batches
    assert len(pipeline.reports()) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_crash_between_checkpoint_and_commit_publishes_the_same_bytes_later(
    pipeline: Pipeline, uninterrupted: Callable[..., bytes], version: int
) -> None:
    fill(pipeline, 3)
    pipeline.crash_at(CLAIM_AND_VERSION_0 + version, is_commit)
    with pytest.raises(Crash):
        pipeline.train(NumpyTrainer("first"), steps=3)
    pipeline.restart()
    assert [report.version for report in pipeline.reports()] == list(range(1, version))
    (name,) = [name for name in pipeline.store.ids() if name.startswith(f"v{version}-")]
    owed = [record for _, record in pipeline.store.load_outbox(name)]
    pipeline.train(NumpyTrainer("second"), steps=3, takeover=True)
    assert pipeline.reports()[version - 1 : version] == owed
    manifest = pipeline.manifests()[version]
    assert manifest.version == version
    assert manifest.checkpoint == name
    assert b"first" in pipeline.blob(manifest)
    assert manifest.sha256 == pipeline.store.load(name).snapshot
    assert pipeline.blob(pipeline.manifests()[3]).startswith(uninterrupted(3))
    assert_books(pipeline)


def test_a_crash_before_version_0_is_public_publishes_it_first(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    pipeline.crash_at(CLAIM_AND_VERSION_0, is_commit)
    with pytest.raises(Crash):
        pipeline.train(NumpyTrainer("first"), steps=1)
    pipeline.restart()
    assert not pipeline.manifests()
    pipeline.train(NumpyTrainer("second"), steps=1, takeover=True)
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 1]
    assert b"first" in pipeline.blob(pipeline.manifests()[0])
    assert_books(pipeline)


def test_a_crash_before_the_first_checkpoint_leaves_nothing_to_resume(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    trainer = NumpyTrainer()
    pipeline.crash_at(1, is_commit)
    with pytest.raises(Crash):
        pipeline.train(trainer, steps=1)
    pipeline.restart()
    assert not pipeline.store.ids()
    pipeline.train(NumpyTrainer(), steps=1, takeover=True)
    assert_books(pipeline)


def test_a_crash_while_a_checkpoint_is_written_repeats_the_step(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    fill(pipeline, 3)

    class DiesWhileSaving(NumpyTrainer):
        def save(self, folder: Path) -> None:
            super().save(folder)
            if len(self.batches) == 2:
                raise Crash

    with pytest.raises(Crash):
        pipeline.train(DiesWhileSaving(), steps=3)
    assert max(pipeline.store.load(name).version for name in pipeline.store.ids()) == 1
    second = NumpyTrainer()
    pipeline.train(second, steps=3, takeover=True)
    assert second.weights == uninterrupted(3)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]
    assert_books(pipeline)


def test_a_disk_that_refuses_ends_the_learner_with_what_to_do(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pipeline, 1)

    class NoSpace(NumpyTrainer):
        def save(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"checkpoint v0-\w+ could not be written.*No space left on device.*Free space there"):
        pipeline.train(NoSpace(), steps=1)
    assert not pipeline.manifests()


def test_steps_between_two_publications_are_owed_over_a_restart(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    """kappa = 2: version 3 has a checkpoint, but its report waits for version 4's transaction."""
    kappa: dict[str, Any] = {"staleness": {"publication_period": 2}}
    fill(pipeline, 3)
    running = pipeline.start(NumpyTrainer("first"), **kappa)
    pipeline.wait_for(PROGRESS, Progress, lambda progress: progress.version == 3, "version 3")
    running.stop()
    assert [report.version for report in pipeline.reports()] == [1, 2]
    fill(pipeline, 4, start=3)
    second = NumpyTrainer("second")
    pipeline.train(second, steps=4, takeover=True, **kappa)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4]
    assert [report.session for report in pipeline.reports()][2:] == [claim.session for claim in pipeline.read(STEPS, SessionClaim)]
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 2, 4]
    assert second.weights == uninterrupted(4, **kappa)
    assert_books(pipeline)


def test_checkpoints_every_second_step_repeat_at_most_that(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    """every = kappa = 2: a crash in step 3 goes back to version 2, whose checkpoint holds the reports of versions 1 and 2."""
    rare: dict[str, Any] = {"staleness": {"publication_period": 2}, "checkpoint": {"every": 2, "keep": 9}}
    fill(pipeline, 4)

    class DiesInStep(NumpyTrainer):
        def step(self, batch: TrainingBatch) -> TrainResult:
            result = super().step(batch)
            if len(self.batches) == 4:
                raise Crash
            return result

    with pytest.raises(Crash):
        pipeline.train(DiesInStep(), steps=4, **rare)
    assert sorted(name.partition("-")[0] for name in pipeline.store.ids()) == ["v0", "v2"]
    second = NumpyTrainer()
    pipeline.train(second, steps=4, takeover=True, **rare)
    assert len(second.batches) == 2, "steps 3 and 4, again or for the first time"
    assert second.weights == uninterrupted(4, **rare)
    reports = pipeline.reports()
    assert [report.version for report in reports] == [1, 2, 3, 4]
    assert reports[0].checkpoint == reports[1].checkpoint != reports[2].checkpoint == reports[3].checkpoint
    assert [report.snapshot_sha256 is not None for report in reports] == [False, True, False, True]
    assert_books(pipeline)


def test_a_stop_between_two_checkpoints_makes_one(pipeline: Pipeline) -> None:
    rare: dict[str, Any] = {"staleness": {"publication_period": 2}, "checkpoint": {"every": 2}}
    fill(pipeline, 3)
    running = pipeline.start(NumpyTrainer("first"), **rare)
    pipeline.wait_for(PROGRESS, Progress, lambda progress: progress.version == 3, "version 3")
    running.stop()
    assert "v3" in {name.partition("-")[0] for name in pipeline.store.ids()}
    fill(pipeline, 4, start=3)
    second = NumpyTrainer("second")
    pipeline.train(second, steps=4, takeover=True, **rare)
    assert len(second.batches) == 1
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4]
    assert_books(pipeline)


def test_a_policy_that_diverges_is_neither_kept_nor_published(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    fill(pipeline, 3)

    class Diverges(NumpyTrainer):
        def step(self, batch: TrainingBatch) -> TrainResult:
            if len(self.batches) == 1:
                raise TrainingDiverged("The gradient norm is nan.", hint="Lower [learner] lr.")
            return super().step(batch)

    running = pipeline.start(Diverges())
    with pytest.raises(TrainingDiverged, match=r"gradient norm is nan.*Lower \[learner\] lr"):
        running.join()
    assert running.value("echo_learner_diverged") == 1
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 1]
    assert [report.version for report in pipeline.reports()] == [1]
    assert max(pipeline.store.load(name).version for name in pipeline.store.ids()) == 1
    second = NumpyTrainer()
    pipeline.train(second, steps=3, takeover=True)
    assert second.weights == uninterrupted(3), "whoever goes on begins before the step that diverged"
    assert_books(pipeline)


def test_checkpoints_that_the_log_still_needs_are_kept_whatever_their_number(
    pipeline: Pipeline, uninterrupted: Callable[..., bytes]
) -> None:
    """kappa = 4, two kept: version 8 is durable but not public, and only the chain of checkpoints since 4 says whose child it is."""
    sparse: dict[str, Any] = {"staleness": {"budget": 9, "publication_period": 4}, "checkpoint": {"keep": 2}}
    fill(pipeline, 9)
    pipeline.crash_at(CLAIM_AND_VERSION_0 + 2, is_commit)
    with pytest.raises(Crash):
        pipeline.train(NumpyTrainer(), steps=9, **sparse)
    pipeline.restart()
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 4]
    second = NumpyTrainer("second")
    pipeline.train(second, steps=9, takeover=True, **sparse)
    assert [report.version for report in pipeline.reports()] == list(range(1, 10))
    assert second.weights == uninterrupted(9, **sparse)
    assert_books(pipeline)
