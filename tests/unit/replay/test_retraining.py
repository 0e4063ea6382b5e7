"""Training again from the log gives the trainer exactly what it was given: its weights here are a digest of every array it ever saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_ops.cli.retrain import parse_versions
from echo_replay.history import History
from echo_replay.retrain import Match, RetrainedVersion, RetrainParts, TrainingLog, plan_retraining, retrain
from echo_schemas.columns import LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE, pack
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Record, RewardControl, RewardTerm, StepReport, WeightManifest
from echo_schemas.topics import CONTROL, RUNS, STEPS, TRAJECTORIES
from echo_tasks.catalogue import load_task
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUPS_PER_STEP, Pipeline, fill, sample
from tests.unit.replay.forged import STEPS_TRAINED, Edit, SoundRun, only, run_record
from tests.unit.replay.test_unproved_runs import in_blobs, remove

DISTANCE = 0.25


def train_again(
    pipeline: Pipeline, versions: str, *, from_start: bool = False, tolerance: float = 0.0, folder: Path | None = None, **sections: Any
) -> list[RetrainedVersion]:
    """Retrain with a fresh trainer. `folder`: whose checkpoints are kept, if not the pipeline's own."""
    settings, trainer = pipeline.settings(**sections), NumpyTrainer()
    store = pipeline.store if folder is None else Pipeline(folder).store
    with History(pipeline.bus, "demo") as history:
        log = TrainingLog(history)
        plan = plan_retraining(log, store, settings, parse_versions(versions), from_start=from_start)
        parts = RetrainParts(
            settings=settings,
            store=store,
            trainer=trainer,
            task=load_task(settings.task.name, settings.task.options),
            distance=lambda *_: DISTANCE,
            tolerance=tolerance,
        )
        return list(retrain(parts, log, plan))


def assert_identical(found: list[RetrainedVersion], versions: Iterable[int]) -> None:
    assert [(each.version, each.match) for each in found] == [(version, Match.IDENTICAL) for version in versions]
    assert all(each.sha256 == each.published_sha256 for each in found)


def test_a_run_from_its_first_step(sound: SoundRun) -> None:
    assert_identical(train_again(sound.pipeline, f"0..{STEPS_TRAINED}", from_start=True), range(STEPS_TRAINED + 1))


def test_a_run_from_a_checkpoint_that_is_kept(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, "demo") as history:
        plan = plan_retraining(TrainingLog(history), sound.pipeline.store, sound.pipeline.settings(), range(6, 7), from_start=False)
    assert plan.start == 5
    assert plan.state is not None
    assert_identical(train_again(sound.pipeline, "6"), [6])


def test_batches_in_blobs(sound: SoundRun, tmp_path: Path) -> None:
    assert_identical(train_again(in_blobs(sound.pipeline, tmp_path, sound), "0..6", from_start=True), range(7))


@pytest.mark.parametrize(
    ("sections", "published"),
    [
        ({"learner": {"updates_per_step": 2}}, range(5)),
        ({"learner": {"updates_per_step": 2, "split": "samples"}}, range(5)),
        ({"learner": {"scale_by_std": False, "micro_batch_tokens": 4}}, range(5)),
        ({"staleness": {"budget": 3, "publication_period": 2, "min_group_size": 1}, "checkpoint": {"every": 2}}, (0, 2, 4)),
        ({"staleness": {"budget": 1, "publication_period": 1, "over_budget": "withhold", "min_group_size": 1}}, range(5)),
        ({"staleness": {"budget": 1, "publication_period": 1, "over_budget": "downweight", "min_group_size": 1}}, range(5)),
    ],
    ids=[
        "two updates",
        "two updates by samples",
        "plain advantages in small cuts",
        "every second version published",
        "withheld",
        "downweighted",
    ],
)
def test_runs_of_other_kinds(tmp_path: Path, quick: None, sections: dict[str, Any], published: Iterable[int]) -> None:
    pipeline = Pipeline(tmp_path, options=sections)
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2)
    # Half of each group is older than the other.
    for seq in range(2 * GROUPS_PER_STEP, 4 * GROUPS_PER_STEP):
        members = [pipeline.sample(seq, index, version=2 * index) for index in range(2)]
        for member, where in zip(members, pipeline.write(TRAJECTORIES, *members), strict=True):
            pipeline.write_reward(member, where, float(member.index))
    pipeline.train(NumpyTrainer(), steps=4, takeover=True)
    assert_identical(train_again(pipeline, "0..4", from_start=True), published)


def test_rewards_that_got_another_weight_on_the_way(tmp_path: Path, quick: None) -> None:
    pipeline = Pipeline(tmp_path)
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2)
    terms = (RewardTerm(name="exact", weight=-2.0), RewardTerm(name="brevity", weight=0.5, required=False, default=0.75))
    pipeline.write(
        CONTROL, Control(run_id="demo", epoch=1, rewards=RewardControl(from_version=3, terms=terms), issued_by="test", time_ms=1)
    )
    members = [sample(4, index) for index in range(2)]
    for member, where in zip(members, pipeline.write(TRAJECTORIES, *members), strict=True):
        pipeline.write_reward(member, where, float(member.index))
        if member.index:
            pipeline.write_reward(member, where, 3.0, name="brevity")
    pipeline.write_group(5)
    pipeline.train(NumpyTrainer(), steps=3, takeover=True)
    assert pipeline.reports()[-1].reward_terms == terms
    assert_identical(train_again(pipeline, "0..3", from_start=True), range(4))


# What is wrong is said


@pytest.mark.parametrize(("tolerance", "match"), [(0.0, Match.DIFFERS), (DISTANCE, Match.WITHIN)])
def test_weights_that_come_out_as_others(sound: SoundRun, tmp_path: Path, tolerance: float, match: Match) -> None:
    def otherwise(report: StepReport) -> Iterable[Record]:
        """One sample was trained in another place of the order."""
        if report.version == 3 and report.batch is not None:
            order = np.frombuffer(report.batch.order, TOKEN_DTYPE)[::-1]
            report = replace(report, batch=replace(report.batch, order=pack(order, TOKEN_DTYPE)))
        yield report

    found = train_again(sound.forge(tmp_path, only(StepReport, otherwise)), "2..4", from_start=True, tolerance=tolerance)
    assert [each.match for each in found] == [Match.IDENTICAL, match, match]
    assert [each.distance for each in found] == [0.0, DISTANCE, DISTANCE]


def an_edit(kind: type[Record], version: int, change: Callable[[Any], Record]) -> Edit:
    return only(kind, lambda record: (change(record) if getattr(record, "version", -1) == version else record,))


def test_rewards_that_do_not_give_the_advantages(sound: SoundRun, tmp_path: Path) -> None:
    def other(report: StepReport) -> StepReport:
        assert report.batch is not None
        advantages = np.frombuffer(report.batch.advantages, LOGPROB_DTYPE) + 1
        return replace(report, batch=replace(report.batch, advantages=pack(advantages, LOGPROB_DTYPE)))

    with pytest.raises(UserError, match=r"report of version 2 do not give the report.s advantages"):
        train_again(sound.forge(tmp_path, an_edit(StepReport, 2, other)), "2", from_start=True)


def test_a_record_that_is_another_sample(sound: SoundRun, tmp_path: Path) -> None:
    def other(report: StepReport) -> StepReport:
        assert report.batch is not None
        seqs = np.frombuffer(report.batch.seqs, OFFSET_DTYPE)[::-1]
        return replace(report, batch=replace(report.batch, seqs=pack(seqs, OFFSET_DTYPE)))

    with pytest.raises(UserError, match="version 2 was trained on seq"):
        train_again(sound.forge(tmp_path, an_edit(StepReport, 2, other)), "2", from_start=True)


@pytest.mark.parametrize(("offset", "partition"), [(10_000, 0), (8, 0)])
def test_a_record_that_is_not_in_the_log(sound: SoundRun, tmp_path: Path, offset: int, partition: int) -> None:
    """Beyond its end, or where something lies that is no record of this run."""

    def other(report: StepReport) -> StepReport:
        assert report.batch is not None
        places = np.frombuffer(report.batch.offsets, OFFSET_DTYPE).copy()
        partitions = np.frombuffer(report.batch.partitions, TOKEN_DTYPE).copy()
        places[0], partitions[0] = offset, partition
        return replace(report, batch=replace(report.batch, offsets=pack(places, OFFSET_DTYPE), partitions=pack(partitions, TOKEN_DTYPE)))

    with pytest.raises(UserError, match=f"partition {partition}, offset {offset}, where the log has no record"):
        train_again(sound.forge(tmp_path, an_edit(StepReport, 2, other)), "2", from_start=True)


def test_samples_that_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    remove(copy, TRAJECTORIES, 2)
    with pytest.raises(UserError, match=r"samples of version 1 are missing. Retention has removed \d samples of partition"):
        train_again(copy, "3", from_start=True)


def test_reports_that_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    remove(copy, STEPS, [where.offset for where, _ in copy.placed(STEPS, StepReport)][2], 0)
    with pytest.raises(UserError, match="reports of versions 1 to 2 are not in the log"):
        train_again(copy, "4", from_start=True)
    assert_identical(train_again(copy, "6", folder=sound.pipeline.folder), [6])


def test_a_batch_that_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    copy = in_blobs(sound.pipeline, tmp_path, sound)
    remove(copy, STEPS, 3, 0)
    with pytest.raises(UserError, match="removed the batch of version 1"):
        train_again(copy, "3", from_start=True)


def test_a_batch_that_cannot_be_read(sound: SoundRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch of version 1 cannot be read"):
        train_again(in_blobs(sound.pipeline, tmp_path, sound, garbage=True), "3", from_start=True)


@pytest.mark.parametrize("from_start", [True, False])
def test_settings_that_are_not_the_runs(sound: SoundRun, *, from_start: bool) -> None:
    """A checkpoint keeps them all; `runs` knows what the copy's record says."""
    with pytest.raises(UserError, match=r"staleness.budget|learner.lr"):
        train_again(sound.pipeline, "6", from_start=from_start, learner={"lr": 0.5}, staleness={"budget": 2})


def test_versions_that_nobody_published(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(WeightManifest, lambda manifest: (manifest,) if manifest.version % 2 == 0 else ()))
    with pytest.raises(UserError, match=r"None of the versions 3 to 3 was published.*nearest published version is [24]"):
        train_again(copy, "3")
    with pytest.raises(UserError, match="Version 9 is not in the log; the newest step is 6"):
        train_again(copy, "6..9")


def test_a_run_that_published_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    with pytest.raises(UserError, match="knows no run 'demo'"):
        train_again(pipeline, "1")
    pipeline.write(RUNS, run_record(pipeline))
    with pytest.raises(UserError, match="has published nothing"):
        train_again(pipeline, "1")


@pytest.mark.parametrize("text", ["", "a", "3..", "..3", "5..3", "-1", "1-3"])
def test_versions_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="names no range"):
        parse_versions(text)


def test_versions_are_both_included() -> None:
    assert list(parse_versions("3..5")) == [3, 4, 5]
    assert list(parse_versions(" 7 ")) == [7]
