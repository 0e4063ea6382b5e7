"""A fork is audited with what it inherited, and trained again from the checkpoint that it began with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.start.fork import ForkOrder, fork_run
from echo_replay.audit import audit_run
from echo_replay.history import History
from echo_replay.retrain import Match, RetrainParts, TrainingLog, plan_retraining, retrain
from echo_replay.verdicts import Promise, Verdict
from echo_schemas.codec import lock_file_codec
from echo_schemas.columns import OFFSET_DTYPE, pack
from echo_schemas.errors import UserError
from echo_schemas.records import StepReport
from echo_schemas.topics import RUNS, STEPS
from echo_tasks.catalogue import load_task
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUPS_PER_STEP, Pipeline
from tests.unit.replay.forged import run_record

pytestmark = pytest.mark.slow

FORK = "demo-2"
BEGUN, LAST = 2, 4


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners that have ended were of this process, which lives: nobody need listen long for their heartbeats."""
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 0.2)


def groups(pipeline: Pipeline, steps: Iterable[int], *, version: int, **changes: Any) -> None:
    """What these steps train, sampled by `version`, whose checksum is known from the run's manifests."""
    shas = {0: NumpyTrainer().snapshot_sha256} | {manifest.version: manifest.sha256 for manifest in pipeline.manifests()}
    for step in steps:
        for seq in range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP):
            pipeline.write_group(seq, version=version, weights_sha256=shas[version], **changes)


def forked(folder: Path, *, weights_only: bool = False) -> Pipeline:
    """A run of three steps, and a fork of its second version that trains two more."""
    pipeline = Pipeline(folder / "demo", options={"checkpoint": {"keep": 9}})
    pipeline.write(RUNS, run_record(pipeline), run_record(pipeline, FORK))
    groups(pipeline, range(1, 4), version=0)
    pipeline.train(NumpyTrainer(), steps=3)
    order = ForkOrder(run_id=FORK, folder=folder / FORK, version=BEGUN, weights_only=weights_only)
    fork_run(pipeline.bus, pipeline.settings(), order)
    groups(pipeline, range(BEGUN + 1, LAST + 1), version=BEGUN, run_id=FORK)
    pipeline.train(NumpyTrainer(), steps=LAST, takeover=True, **sections(folder))
    return pipeline


def sections(folder: Path) -> dict[str, Any]:
    return {"run": {"name": FORK}, "checkpoint": {"folder": str(folder / FORK), "keep": 9}}


def train_again(pipeline: Pipeline, folder: Path, *, from_start: bool = True) -> list[tuple[int, Match]]:
    settings = pipeline.settings(**sections(folder))
    bus, store = replace(pipeline.bus, run_id=FORK), CheckpointStore(folder / FORK / "checkpoints", lock_file_codec())
    with History(bus, FORK) as history:
        log = TrainingLog(history)
        parts = RetrainParts(
            settings=settings,
            store=store,
            trainer=NumpyTrainer(),
            task=load_task(settings.task.name, settings.task.options),
            distance=lambda *_: 1.0,
            tolerance=0.0,
        )
        found = retrain(parts, log, plan_retraining(log, store, settings, range(BEGUN, LAST + 1), from_start=from_start))
        return [(each.version, each.match) for each in found]


@pytest.mark.parametrize("weights_only", [False, True])
def test_both_runs_are_sound(tmp_path: Path, quick: None, *, weights_only: bool) -> None:
    pipeline = forked(tmp_path, weights_only=weights_only)
    for run_id in ("demo", FORK):
        report = audit_run(pipeline.bus, run_id)
        assert {each.promise: (each.examples, each.gaps) for each in report.findings if each.verdict is not Verdict.PROVED} == {}
    assert audit_run(pipeline.bus, FORK).num_steps == LAST - BEGUN


def test_a_fork_that_trains_a_seq_of_its_parent_again(tmp_path: Path, quick: None) -> None:
    pipeline = forked(tmp_path)
    (last,) = (
        report for _, report in pipeline.placed(STEPS, StepReport, every_run=True) if (report.run_id, report.version) == (FORK, LAST)
    )
    assert last.batch is not None
    seqs = np.frombuffer(last.batch.seqs, OFFSET_DTYPE).copy()
    seqs[:2] = 0
    again = replace(last, version=LAST + 1, parent=last.checkpoint, batch=replace(last.batch, seqs=pack(seqs, OFFSET_DTYPE)))
    pipeline.write(STEPS, again, partition=0)
    examples = audit_run(pipeline.bus, FORK).finding(Promise.SEQS).examples
    (example,) = (each for each in examples if "before it was forked" in each.says)
    assert example.where == {"seq": 0, "versions": [LAST + 1], "parent": "demo", "at": 1}


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_fork_comes_out_of_its_log_again(tmp_path: Path, quick: None, *, weights_only: bool) -> None:
    pipeline = forked(tmp_path, weights_only=weights_only)
    assert train_again(pipeline, tmp_path) == [(version, Match.IDENTICAL) for version in range(BEGUN, LAST + 1)]


def test_a_fork_whose_first_checkpoint_is_gone(tmp_path: Path, quick: None) -> None:
    pipeline = forked(tmp_path)
    with pytest.raises(UserError, match="is a fork that began at version 2"):
        train_again(pipeline, tmp_path / "elsewhere")
