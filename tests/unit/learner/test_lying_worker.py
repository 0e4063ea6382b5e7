"""A worker that claims a version and samples from the one before it, beside an honest one: found out, dropped, and named."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_learner.training.batch import TrainingBatch
from echo_learner.training.trainer import TrainResult
from echo_rollout.engines.engine import Generation, Snapshot, SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import Drop, DropReason, Sampling, Span, Trajectory, VersionSpan, WeightKind
from echo_schemas.topics import REWARDS, TRAJECTORIES
from tests.unit.core.records import reward
from tests.unit.learner.numpy_trainer import VOCABULARY, NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline

pytestmark = pytest.mark.slow

STEPS = 4


def logprob_under(version: int) -> float:
    """What this policy says of any token: each version is a little surer."""
    return -2.0 + 0.1 * version


class PolicyEngine(ScriptedEngine):
    """Serves the version so many before the one that it claims."""

    def __init__(self, *, behind: int) -> None:
        super().__init__()
        self._behind = behind

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        found = await super().generate(prompt, n, sampling)
        served = max(0, found[0].version_spans[0].version - self._behind)
        return [replace(each, logprobs=np.full(len(each.token_ids), logprob_under(served), np.float32)) for each in found]


class CountingTrainer(NumpyTrainer):
    """Knows which version its weights are, and what that version says of a token."""

    version = 0

    def __init__(self, *, can_remember: bool = True) -> None:
        super().__init__()
        self._remembered: list[int] = []
        self._can_remember = can_remember

    @property
    def remembered(self) -> Collection[int]:
        return self._remembered

    def step(self, batch: TrainingBatch) -> TrainResult:
        rows = np.where(batch.fresh, np.abs(batch.sampler - logprob_under(self.version)), np.nan)
        differences = np.array([row.mean() for row in np.split(rows, np.cumsum(batch.num_generated)[:-1])])
        self.version += 1
        return replace(super().step(batch), differences=differences)

    def remember(self, version: int, at_most: int) -> None:
        assert version == self.version
        if self._can_remember:
            self._remembered.append(version)

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[Any]:
        return [np.full(number, logprob_under(version), np.float32) for number in batch.num_generated]


def group_of(pipeline: Pipeline, engine: PolicyEngine, worker: str, seq: int, version: int) -> list[Trajectory]:
    """What a worker would publish."""

    prompt = seq % VOCABULARY

    async def generate() -> list[Generation]:
        ref = SnapshotRef(version=version, sha256=f"sha-{version}")
        await engine.install(Snapshot(ref=ref, kind=WeightKind.LORA, folder=Path()))
        return await engine.generate([prompt], GROUP_SIZE, Sampling(max_new_tokens=3))

    return [
        pipeline.sample(
            seq,
            index,
            version=version,
            worker_id=worker,
            token_ids=pack_tokens([prompt, *generation.token_ids.tolist()]),
            generated=(Span(start=1, end=1 + len(generation.token_ids)),),
            version_spans=(VersionSpan(start=1, end=1 + len(generation.token_ids), version=version),),
            logprobs=pack_logprobs(generation.logprobs),
        )
        for index, generation in enumerate(asyncio.run(generate()))
    ]


def write_group(pipeline: Pipeline, members: Sequence[Trajectory]) -> None:
    """A group and its rewards."""
    for member, where in zip(members, pipeline.write(TRAJECTORIES, *members), strict=True):
        judged = reward(where, member.seq, index=member.index, value=float(member.index))
        pipeline.write(REWARDS, judged, partition=where.partition)


def test_a_worker_that_serves_an_older_version_than_it_claims(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    running = pipeline.start(CountingTrainer(), learner={"steps": STEPS}, staleness={"budget": 1, "publication_period": 1})
    honest, liar = PolicyEngine(behind=0), PolicyEngine(behind=1)
    seq = 0
    for version in range(STEPS):
        pipeline.wait_for_manifest(version)
        # The liar's comes first, so that it would be trained first.
        write_group(pipeline, group_of(pipeline, liar, "liar", seq, version))
        for number in range(1, GROUPS_PER_STEP + 1):
            write_group(pipeline, group_of(pipeline, honest, "honest", seq + number, version))
        seq += 1 + GROUPS_PER_STEP
    running.join()

    drops = [drop for drop in pipeline.drops() if drop.why is DropReason.WRONG_VERSION]
    assert {drop.version for drop in drops if drop.what is not None} <= set(range(1, STEPS))
    assert {drop.worker_id for drop in drops if drop.what is not None} == {"liar"}
    assert len([drop for drop in drops if drop.what is not None]) >= GROUP_SIZE * (STEPS - 2), "every claim but the last was looked at"
    assert all("Worker liar claims version" in (drop.detail or "") for drop in drops if drop.what is None)
    assert running.value("echo_learner_claims_total", worker="liar", verdict="disagrees") >= STEPS - 2
    assert running.value("echo_learner_claims_total", worker="honest", verdict="disagrees") == 0
    trained = set(pipeline.accounts().trained)
    lies = {where for where, record in pipeline.placed(TRAJECTORIES, Trajectory) if record.worker_id == "liar" and record.min_version}
    assert not trained & lies
    pipeline.accounts().assert_each_once()
    assert isinstance(drops[0], Drop)


def test_where_no_copy_of_the_weights_fits_a_lie_shows_in_the_first_step_that_trains_it(tmp_path: Path) -> None:
    """What was trained is trained; whatever else came under the same claim is not."""
    pipeline = Pipeline(tmp_path)
    running = pipeline.start(
        CountingTrainer(can_remember=False), learner={"steps": 2}, staleness={"budget": 1, "publication_period": 1}
    )  # fmt: skip
    liar, honest = PolicyEngine(behind=-1), PolicyEngine(behind=0)
    pipeline.wait_for_manifest(0)
    for seq in range(GROUPS_PER_STEP + 1):
        write_group(pipeline, group_of(pipeline, liar, "liar", seq, 0))
    pipeline.wait_for_manifest(1)
    for seq in range(GROUPS_PER_STEP + 1, 2 * GROUPS_PER_STEP + 1):
        write_group(pipeline, group_of(pipeline, honest, "honest", seq, 1))
    running.join()

    assert running.value("echo_learner_claims_total", worker="liar", verdict="disagrees") == 1
    assert running.value("echo_learner_claims_total", worker="honest", verdict="agrees") == 1
    assert {drop.seq for drop in pipeline.drops() if drop.why is DropReason.WRONG_VERSION} == {GROUPS_PER_STEP}
    pipeline.accounts().assert_each_once()
