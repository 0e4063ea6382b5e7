"""Whether learner and worker have the same weights for a version: log-probabilities of samples, compared under the weights of their tag.

Before training: for each published version a worker samples one small probe group, and `trust` picks a trajectory of each worker and
version. The trainer keeps the weights of its newest published versions and computes the samples' log-probabilities again, on all ranks.
In training: the step computes them anyway for samples of exactly the version that it starts from. This costs nothing, and is the only
comparison where no copy of the weights fits beside the model.

Both compare equal versions, so staleness plays no part: a difference comes from the engines, or from a wrong version tag.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo_learner.metrics import LearnerMetrics
from echo_learner.training.batch import TrainingBatch, sample_arrays
from echo_learner.training.microbatches import plan_micro_batches
from echo_learner.trust import Claimed, is_comparable
from echo_schemas.records import Trajectory

logger = logging.getLogger(__name__)


class Comparer(Protocol):
    """The part of the trainer that compares."""

    @property
    def remembered(self) -> Collection[int]:
        """The versions that `logprobs_under` knows."""

    def remember(self, version: int, at_most: int) -> None:
        """Keep a copy of the trained weights, `at_most` copies in all."""

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[npt.NDArray[np.float32]]:
        """Log-probabilities of each sample's generated tokens."""


class Agreement:
    """Compares probe groups and claims; the learner's thread uses it."""

    def __init__(self, trainer: Comparer, metrics: LearnerMetrics, *, versions: int, max_tokens: int) -> None:
        """`versions`: how many published versions to remember, if they fit. `max_tokens`: padded tokens in one forward pass."""
        self._trainer = trainer
        self._metrics = metrics
        self._versions = versions
        self._max_tokens = max_tokens
        self.num_samples = 0
        self.largest = 0.0

    def remember(self, version: int) -> None:
        """Keep the trainer's weights as those of `version`."""
        self._trainer.remember(version, self._versions)

    def compare(self, claims: Sequence[Claimed]) -> list[tuple[Claimed, float | None]]:
        """Each claim with the mean difference a token of its version, in nats; None where it cannot be compared: the version's weights are
        not kept, or a sample has no log-probabilities of its sampler. Claims of one version go through the model together."""
        by_version: dict[int, list[Claimed]] = {}
        found: list[tuple[Claimed, float | None]] = []
        for claimed in claims:
            is_whole = all(is_comparable(member) and _tokens_of(member, claimed.version).any() for member in claimed.members)
            if is_whole and claimed.version in self._trainer.remembered:
                by_version.setdefault(claimed.version, []).append(claimed)
            else:
                found.append((claimed, None))
        for version, comparable in by_version.items():
            found += zip(comparable, self._differences(version, comparable), strict=True)
        return found

    def _differences(self, version: int, claims: Sequence[Claimed]) -> list[float]:
        """The mean |difference| a token of each claim."""
        members = tuple(member for claimed in claims for member in claimed.members)
        logprobs = self._trainer.logprobs_under(version, _as_batch(members, version, self._max_tokens))
        differences = [
            np.abs(ours - member.logprob_values)[_tokens_of(member, version)] for ours, member in zip(logprobs, members, strict=True)
        ]
        largest = float(max(difference.max() for difference in differences))
        self.num_samples += len(members)
        self.largest = max(self.largest, largest)
        self._metrics.probes.inc(len(members))
        self._metrics.probe_difference.set(largest)
        logger.debug("Version %d: log-probabilities differ by %.2e at most", version, largest)
        rest = iter(differences)
        return [float(np.concatenate([next(rest) for _ in claimed.members]).mean()) for claimed in claims]


def claims_in_training(
    trajectories: Sequence[Trajectory], version: int, differences: npt.NDArray[np.float64]
) -> list[tuple[Claimed, float]]:
    """For each worker whose fresh samples were trained by a step that began at `version`: the samples as one claim, and their mean
    difference a token. `differences` [N]: of a TrainResult, or empty."""
    by_worker: dict[str, list[int]] = {}
    for sample in np.flatnonzero(~np.isnan(differences)).tolist():
        by_worker.setdefault(trajectories[sample].worker_id, []).append(sample)
    found = []
    for samples in by_worker.values():
        members = tuple(trajectories[sample] for sample in samples)
        weights = [member.num_generated for member in members]
        found.append((Claimed(version, members), float(np.average(differences[samples], weights=weights))))
    return found


def _tokens_of(member: Trajectory, version: int) -> npt.NDArray[np.bool_]:
    """Which generated tokens are tagged with `version`, [G]: the tags cover the generated tokens in order."""
    return np.repeat([span.version == version for span in member.version_spans], [span.end - span.start for span in member.version_spans])


def _as_batch(group: Sequence[Trajectory], version: int, max_tokens: int) -> TrainingBatch:
    """The group's tokens, none of which is trained."""
    plan = plan_micro_batches([len(member.tokens) for member in group], [len(group)], num_updates=1, max_tokens=max_tokens)
    rows = sum(member.num_generated for member in group)
    return TrainingBatch(
        version=version,
        advantages=np.zeros(rows, np.float32),
        mask=np.zeros(rows, np.bool_),
        fresh=np.zeros(rows, np.bool_),
        **sample_arrays(group, plan),
    )
