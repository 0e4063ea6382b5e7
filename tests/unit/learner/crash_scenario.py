"""A run of three steps whose learners may die anywhere, beside the same run in which nothing happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from echo_learner import checkpoint
from echo_schemas.columns import pack_tokens
from echo_schemas.topics import TRAJECTORIES
from tests.unit.learner.crash_point import Crash, CrashPoint, calls_of
from tests.unit.learner.numpy_trainer import VOCABULARY, NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill, sample

NUM_STEPS = 3


class Where(StrEnum):
    """What a learner may die at: a call to the cluster on one of its two threads that make any, or one `fsync` of a checkpoint."""

    LEARNER = "MainThread"
    PUBLICATION = "publication"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Death:
    """The `number`-th call at `where` does not come back, if there are so many."""

    where: Where
    number: int


class Scenario:
    """Makes and compares runs that publish every `period` steps, below `folder`."""

    def __init__(self, folder: Path, period: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._num_runs = 0
        self.options = {"staleness": {"publication_period": period}, "checkpoint": {"keep": 100}}
        self._quiet = self.make()
        self._weights = self.train(self._quiet, []).weights

    def make(self) -> Pipeline:
        """Groups for three steps, and among them records that meet every other end: a bad token, two attempts, the same record again."""
        self._num_runs += 1
        pipeline = Pipeline(self._folder / f"run-{self._num_runs}", options=self.options)
        fill(pipeline, 1)
        pipeline.write_group(1000, token_ids=pack_tokens([0, 1, VOCABULARY]))
        pipeline.write(TRAJECTORIES, sample(0, 0), sample(1, 1, attempt="b"))
        fill(pipeline, NUM_STEPS, start=1)
        pipeline.write(TRAJECTORIES, sample(5, 1))
        return pipeline

    def train(self, pipeline: Pipeline, deaths: Sequence[Death]) -> NumpyTrainer:
        """One learner after another until one has all steps; the n-th dies the n-th death, or not at all if it never gets there."""
        for number, death in enumerate(deaths):
            self._arrange(pipeline, death)
            trainer = NumpyTrainer(by=f"process {number}")
            try:
                pipeline.train(trainer, steps=NUM_STEPS, takeover=True)
            except Crash:
                continue
            return trainer
        self._arrange(pipeline, None)
        trainer = NumpyTrainer(by="last process")
        pipeline.train(trainer, steps=NUM_STEPS, takeover=True)
        return trainer

    def num_calls(self, where: Where) -> int:
        """How many chances to die a run without deaths has."""
        pipeline = self.make()
        point = self._arrange(pipeline, Death(where, 0))
        pipeline.train(NumpyTrainer(), steps=NUM_STEPS)
        return len(point.calls)

    def _arrange(self, pipeline: Pipeline, death: Death | None) -> CrashPoint:
        number, where = (0, Where.DISK) if death is None else (death.number, death.where)
        point = CrashPoint(number, (lambda _: True) if where is Where.DISK else calls_of(where))
        pipeline.cluster.faults.before = None if where is Where.DISK else point
        self._monkeypatch.setattr(checkpoint, "_sync", lambda path: point("sync") if where is Where.DISK else None)
        return point

    def assert_as_if_nothing_had_happened(self, pipeline: Pipeline, trainer: NumpyTrainer) -> None:
        """Each step and snapshot public once, of the same batches, in one lineage; each record with one end, the same as ever."""
        assert trainer.weights == self._weights
        reports, theirs = pipeline.reports(), self._quiet.reports()
        assert [(report.version, report.batch) for report in reports] == [(report.version, report.batch) for report in theirs]
        assert [report.parent for report in reports[1:]] == [report.checkpoint for report in reports[:-1]]
        manifests = pipeline.manifests()
        assert [manifest.version for manifest in manifests] == [manifest.version for manifest in self._quiet.manifests()]
        assert [manifest.parent_sha256 for manifest in manifests[1:]] == [manifest.sha256 for manifest in manifests[:-1]]
        assert pipeline.blob(manifests[-1]).startswith(self._weights)
        for manifest in manifests:
            assert manifest.sha256 == pipeline.store.load(manifest.checkpoint).snapshot
        mine, wanted = pipeline.accounts(), self._quiet.accounts()
        assert mine.dropped == wanted.dropped
        assert mine.seqs_dropped == wanted.seqs_dropped
        assert_books(pipeline, num_open=len(wanted.open))
