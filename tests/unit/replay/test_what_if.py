"""Training again under other rewards: the same ones give the same weights, others give others, and both are measured."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_core.evaluation import EvaluationSpec
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.evaluation.requests import Planned
from echo_ops.cli.retrain import parse_terms, parse_versions
from echo_ops.cli.retrain_output import measured_lines, other_line
from echo_replay.batches import OtherRewards
from echo_replay.history import History
from echo_replay.retrain import Match, RetrainedVersion, RetrainParts, TrainingLog, plan_retraining, retrain
from echo_replay.what_if import Measured, ModelLimits, measure, read_other_rewards
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.errors import UserError
from echo_schemas.records import RewardTerm, Sampling, WeightKind
from echo_streams.scoring import Attached
from echo_tasks.catalogue import load_task
from echo_tasks.rewards import ScoredSample, reward
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import AnyTask, NumberCodec, Pipeline
from tests.unit.replay.forged import SoundRun

AGAINST = RewardTerm(name="exact", weight=-1.0)


def train(pipeline: Pipeline, versions: str, terms: tuple[RewardTerm, ...], keep: Path | None = None) -> list[RetrainedVersion]:
    """From the first step on, under `terms` as the log has their values."""
    settings = pipeline.settings()
    with History(pipeline.bus, "demo") as history:
        log = TrainingLog(history)
        plan = plan_retraining(log, pipeline.store, settings, parse_versions(versions), from_start=True)
        parts = RetrainParts(
            settings=settings,
            store=pipeline.store,
            trainer=NumpyTrainer(),
            task=load_task(settings.task.name, settings.task.options),
            distance=lambda *_: 0.5,
            cosine=lambda *_: 0.25,
            tolerance=0.0,
            other=read_other_rewards(history, range(plan.start + 1, plan.last + 1), terms),
            keep=keep,
        )
        return list(retrain(parts, log, plan))


def test_under_the_same_rewards_the_same_weights_come_out(sound: SoundRun) -> None:
    found = train(sound.pipeline, "1..6", (RewardTerm(name="exact", weight=1.0),))
    assert [(each.version, each.match, each.cosine) for each in found] == [(version, Match.IDENTICAL, 1.0) for version in range(1, 7)]
    assert other_line(found[0]) == "version 1: the same weights"


def test_under_others_others_do_and_the_last_is_kept(sound: SoundRun, tmp_path: Path) -> None:
    found = train(sound.pipeline, "1..3", (AGAINST,), tmp_path / "kept")
    assert [(each.match, each.distance, each.cosine) for each in found] == [(Match.DIFFERS, 0.5, 0.25)] * 3
    assert any((tmp_path / "kept").iterdir())
    assert other_line(found[2]) == "version 3: 0.5 of the way from the start beside what was published; cosine of the two ways 0.250"


def test_a_sample_without_a_value_is_named(sound: SoundRun) -> None:
    with pytest.raises(UserError, match=r"A sample of version 1, at partition \d, offset \d+, has no value of 'brevity'") as refused:
        train(sound.pipeline, "1..2", (AGAINST, RewardTerm(name="brevity", weight=1.0)))
    assert "rescore" in refused.value.hint


def test_values_are_those_of_the_steps_that_are_trained(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, "demo") as history:
        found = read_other_rewards(history, range(1, 3), (AGAINST,))
    assert isinstance(found, OtherRewards)
    assert len(found.values) == 8
    assert all(set(values) == {"exact"} for values in found.values.values())


def test_weights_that_are_none() -> None:
    assert parse_terms(("exact=1", "my.py:brevity=-0.5", "gone=0")) == (
        RewardTerm(name="exact", weight=1.0),
        RewardTerm(name="my.py:brevity", weight=-0.5),
    )
    with pytest.raises(UserError, match="names a reward twice"):
        parse_terms(("exact=1", "exact=2"))
    with pytest.raises(UserError, match="nothing would be trained"):
        parse_terms(("exact=0",))
    with pytest.raises(UserError, match="is no weight"):
        parse_terms(("exact",))


@reward(name="last")
def last_digit(sample: ScoredSample) -> float:
    """Of the answer's first token; a text where that is 9."""
    token = int(sample.token_ids[-1])
    return float(token) if token != 9 else float("nan")


def measured(*shas: str, **changes: Any) -> list[list[Measured]]:
    """Versions of an engine whose answers follow from prompt and version."""
    sampling = Sampling(max_new_tokens=2)
    fields: dict[str, Any] = {"name": "e", "task": "t", "options": {}, "rewards": ("last",), "pass_reward": "last", "pass_from": 1.0}
    fields |= {"pass_at": (), "prompts": 4, "samples": 2, "sampling": sampling, "seed": 0, "every": 0, "at_start": False, "at_end": False}
    spec = EvaluationSpec(**{**fields, "patience_s": 5.0, **changes})
    engine = ScriptedEngine(answer=lambda prompt, version, index: [2 + version + prompt[0] % 2] * 3)
    weights = [SnapshotFiles(version=7, kind=WeightKind.LORA, config="", folder=Path("nowhere"), files=(), sha256=sha) for sha in shas]
    entry = Attached(name="last", function=last_digit)
    limits = ModelLimits(vocabulary=32, max_length=64)
    return asyncio.run(measure(engine, weights, Planned(spec=spec, task=AnyTask()), [entry], NumberCodec(), limits=limits))


def test_both_are_measured_on_the_same_prompts() -> None:
    before, after = measured("a", "b")
    assert before == [Measured(name="last", mean=2.5, stderr=before[0].stderr)]
    assert before[0].stderr == pytest.approx(0.5 / math.sqrt(3))
    assert after == [replace(before[0], mean=3.5)]
    (line,) = measured_lines(7, list(zip(before, after, strict=True)))
    assert line == "  last  2.5 ± 0.29 as version 7 was published, 3.5 ± 0.29 under the other rewards"


def test_a_prompt_that_the_task_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        raise KeyError(3)

    monkeypatch.setattr(AnyTask, "prompt", nothing)
    with pytest.raises(UserError, match="has no prompt 0: KeyError: 3"):
        measured("a")
