"""Probe groups compared under the weights that they name, and those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_learner import agreement as module
from echo_learner.agreement import Agreement
from echo_learner.metrics import LearnerMetrics
from echo_learner.training.batch import TrainingBatch
from echo_learner.trust import Claimed
from echo_schemas.columns import pack_logprobs
from echo_schemas.records import LogprobSource, Purpose, VersionSpan
from tests.unit.core.records import trajectory


class Weights:
    """Stands for a tensor: a number and a size."""

    def __init__(self, value: float) -> None:
        self.value = value

    def numel(self) -> int:
        return 10

    def element_size(self) -> int:
        return 4


class FakeComparer:
    """Its log-probabilities are all the number that its weights are."""

    def __init__(self, *, can_compare: bool = True) -> None:
        self.can_compare = can_compare
        self.now = 0.0
        self.compared: list[TrainingBatch] = []

    def copy_weights(self) -> Mapping[str, Weights]:
        return {"w": Weights(self.now)}

    def logprobs_under(self, weights: Any, batch: TrainingBatch) -> Sequence[Any]:
        self.compared.append(batch)
        return [np.full(number, weights["w"].value, np.float32) for number in batch.num_generated]


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


def test_weights_above_the_memory_for_them_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeComparer()
    for bound, kept in ((39, 0), (40, 1), (119, 2)):
        monkeypatch.setattr(module, "_MAX_BYTES", bound)
        agreement = Agreement(trainer, LearnerMetrics(), versions=5, max_tokens=256)
        for version in range(5):
            agreement.remember(version)
        agreement.compare([probe(version, 0.0, 0.0) for version in range(5)])
        assert agreement.num_samples == 2 * kept


def test_a_trainer_that_cannot_compare_is_not_asked() -> None:
    agreement = Agreement(FakeComparer(can_compare=False), LearnerMetrics(), versions=2, max_tokens=256)
    agreement.remember(0)
    agreement.compare([probe(0, -1.0, -1.0)])
    assert agreement.num_samples == 0
