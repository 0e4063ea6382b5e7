"""Probe groups compared under the weights that they name, and those that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from echo_learner.agreement import Agreement, claims_in_training
from echo_learner.metrics import LearnerMetrics
from echo_learner.training.batch import TrainingBatch
from echo_learner.trust import Claimed
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import LogprobSource, Purpose, Span, Trajectory, VersionSpan
from tests.unit.core.records import trajectory


class FakeComparer:
    """Its log-probabilities are all the number that its weights are."""

    def __init__(self) -> None:
        self.now = 0.0
        self.remembered: dict[int, float] = {}
        self.compared: list[TrainingBatch] = []

    def remember(self, version: int, at_most: int) -> None:
        self.remembered[version] = self.now
        while len(self.remembered) > at_most:
            del self.remembered[min(self.remembered)]

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[npt.NDArray[np.float32]]:
        self.compared.append(batch)
        return [np.full(number, self.remembered[version], np.float32) for number in batch.num_generated]


def probe(version: int, *logprobs: float) -> Claimed:
    members = (
        trajectory(version, index, version=version, purpose=Purpose.PROBE, logprobs=pack_logprobs([value, value]))
        for index, value in enumerate(logprobs)
    )
    return Claimed(version, tuple(members))


def test_each_group_is_compared_under_its_own_version() -> None:
    trainer, metrics = FakeComparer(), LearnerMetrics()
    agreement = Agreement(trainer, metrics, versions=3, max_tokens=256)
    for version in range(3):
        trainer.now = -float(version)
        agreement.remember(version)
    trainer.now = -99.0
    agreement.compare([probe(2, -2.0, -2.25)])
    assert agreement.largest == 0.25
    agreement.compare([probe(1, -1.0, -1.0)])
    assert agreement.largest == 0.25, "the largest of all versions"
    assert agreement.num_samples == 4
    assert metrics.registry.get_sample_value("echo_learner_probe_logprob_difference") == 0.0
    assert metrics.registry.get_sample_value("echo_learner_probe_samples_total") == 4
    assert not trainer.compared[0].mask.any(), "a probe is never trained"


def test_each_group_gets_its_own_mean_difference_in_one_pass() -> None:
    trainer = FakeComparer()
    agreement = Agreement(trainer, LearnerMetrics(), versions=3, max_tokens=256)
    agreement.remember(0)
    near, far, unknown = probe(0, -0.25, 0.0), probe(0, -1.0, -2.0), probe(7, 0.0)
    unsaid = Claimed(0, tuple(replace(member, logprob_source=LogprobSource.RECOMPUTED) for member in probe(0, 0.0).members))
    found = agreement.compare([near, unknown, far, unsaid])
    assert [(group, difference) for group, difference in found if difference is not None] == [(near, 0.125), (far, 1.5)]
    assert [group for group, difference in found if difference is None] == [unknown, unsaid]
    assert len(trainer.compared) == 1


def test_versions_that_are_forgotten_and_tokens_of_others_are_passed_over() -> None:
    trainer = FakeComparer()
    agreement = Agreement(trainer, LearnerMetrics(), versions=2, max_tokens=256)
    for version in range(4):
        trainer.now = -float(version)
        agreement.remember(version)
    spans = (VersionSpan(start=1, end=2, version=2), VersionSpan(start=2, end=3, version=3))
    mixed = trajectory(0, version_spans=spans, min_version=2, max_version=3, logprobs=pack_logprobs([-2.0, -3.5]))
    found = agreement.compare([probe(1, -5.0, -5.0), Claimed(2, (mixed,)), Claimed(3, (mixed,)), Claimed(3, probe(2, 0.0).members)])
    assert [(claimed.version, difference) for claimed, difference in found] == [(1, None), (3, None), (2, 0.0), (3, 0.5)]


def test_nothing_is_compared_where_no_weights_are_remembered() -> None:
    trainer = FakeComparer()
    agreement = Agreement(trainer, LearnerMetrics(), versions=0, max_tokens=256)
    agreement.remember(0)
    asked = probe(0, -1.0, -1.0)
    assert agreement.compare([asked]) == [(asked, None)]
    assert agreement.num_samples == 0
    assert not trainer.compared


def test_what_a_step_found_out_is_one_claim_a_worker_weighted_by_tokens() -> None:
    def of(worker: str, *logprobs: float) -> Trajectory:
        count = len(logprobs)
        return trajectory(
            0,
            worker_id=worker,
            token_ids=pack_tokens([1, *range(count)]),
            generated=(Span(start=1, end=1 + count),),
            version_spans=(VersionSpan(start=1, end=1 + count, version=3),),
            logprobs=pack_logprobs(logprobs),
        )

    batch = [of("a", -1.0), of("b", -1.0, -1.0), of("a", -1.0, -1.0, -1.0), of("c", -1.0)]
    found = claims_in_training(batch, 3, np.array([0.0, 0.5, 0.4, np.nan]))
    assert [(claimed.claim, difference) for claimed, difference in found] == [(("a", 3), pytest.approx(0.3)), (("b", 3), 0.5)]
    assert found[0][0].members == (batch[0], batch[2])
    assert claims_in_training(batch, 3, np.zeros(0)) == [], "a trainer that says nothing"
