"""Do learner and worker mean the same by a version? Log-probabilities of samples, computed again under the weights that were tagged.

For each published version a worker samples one small group, and of each worker and version some trajectory is looked at (`trust`). The
learner keeps the weights of its newest published versions and compares, so the difference holds no staleness: what is left is the engines'
own disagreement, or a wrong version tag.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from echo_learner.metrics import LearnerMetrics
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.microbatches import plan_micro_batches
from echo_learner.trust import Claimed, is_comparable
from echo_schemas.columns import LOGPROB_DTYPE, TOKEN_DTYPE
from echo_schemas.records import Trajectory

logger = logging.getLogger(__name__)

# Copies of trained weights kept for comparison, all versions together.
_MAX_BYTES = 512 << 20


class Comparer(Protocol):
    """The part of the trainer that compares."""

    @property
    def can_compare(self) -> bool:
        """Whether whole weights are at hand."""

    def copy_weights(self) -> Any:
        """A copy of what is trained."""

    def logprobs_under(self, weights: Any, batch: TrainingBatch) -> Sequence[Any]:
        """Log-probabilities of each sample's generated tokens."""


class Agreement:
    """Compares probe groups; the learner's thread uses it."""

    def __init__(self, trainer: Comparer, metrics: LearnerMetrics, *, versions: int, max_tokens: int) -> None:
        """`versions`: how many published versions to remember, if they fit. `max_tokens`: padded tokens in one forward pass."""
        self._trainer = trainer
        self._metrics = metrics
        self._versions = versions
        self._max_tokens = max_tokens
        self._weights: OrderedDict[int, Any] = OrderedDict()
        self.num_samples = 0
        self.largest = 0.0

    def remember(self, version: int) -> None:
        """Keep the trainer's weights as those of `version`."""
        if not self._trainer.can_compare:
            return
        weights = self._trainer.copy_weights()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        fitting = min(self._versions, _MAX_BYTES // max(1, num_bytes))
        if fitting:
            self._weights[version] = weights
        while len(self._weights) > fitting:
            self._weights.popitem(last=False)

    def compare(self, claims: Sequence[Claimed]) -> list[tuple[Claimed, float | None]]:
        """Each claim with its samples' mean difference a token of its version, in nats; None where it cannot be compared: the version's
        weights are not kept, or the sampler did not say its log-probabilities. Claims of one version go through the model together."""
        by_version: dict[int, list[Claimed]] = {}
        found: list[tuple[Claimed, float | None]] = []
        for claimed in claims:
            is_whole = all(is_comparable(member) and _tokens_of(member, claimed.version).any() for member in claimed.members)
            if claimed.version in self._weights and is_whole:
                by_version.setdefault(claimed.version, []).append(claimed)
            else:
                found.append((claimed, None))
        for version, comparable in by_version.items():
            found += zip(comparable, self._differences(version, comparable), strict=True)
        return found

    def _differences(self, version: int, claims: Sequence[Claimed]) -> list[float]:
        """The mean |difference| a token of each claim."""
        members = tuple(member for claimed in claims for member in claimed.members)
        logprobs = self._trainer.logprobs_under(self._weights[version], _as_batch(members, version, self._max_tokens))
        differences = [
            np.abs(np.asarray(ours) - member.logprob_values)[_tokens_of(member, version)]
            for ours, member in zip(logprobs, members, strict=True)
        ]
        largest = float(max(difference.max() for difference in differences))
        self.num_samples += len(members)
        self.largest = max(self.largest, largest)
        self._metrics.probes.inc(len(members))
        self._metrics.probe_difference.set(largest)
        logger.debug("Version %d: log-probabilities differ by %.2e at most", version, largest)
        rest = iter(differences)
        return [float(np.concatenate([next(rest) for _ in claimed.members]).mean()) for claimed in claims]


def _tokens_of(member: Trajectory, version: int) -> npt.NDArray[np.bool_]:
    """Which generated tokens are tagged with `version`, [G]: the tags cover the generated tokens in order."""
    return np.repeat([span.version == version for span in member.version_spans], [span.end - span.start for span in member.version_spans])


def _as_batch(group: Sequence[Trajectory], version: int, max_tokens: int) -> TrainingBatch:
    """The group's tokens; nothing in it is trained."""
    lengths = np.array([len(member.tokens) for member in group], np.int64)
    num_generated = np.array([member.num_generated for member in group], np.int64)
    generated = np.zeros(int(lengths.sum()), np.bool_)
    for start, member in zip((np.cumsum(lengths) - lengths).tolist(), group, strict=True):
        for span in member.generated:
            generated[start + span.start : start + span.end] = True
    rows = int(num_generated.sum())
    plan = plan_micro_batches(lengths.tolist(), [len(group)], num_updates=1, max_tokens=max_tokens)
    return TrainingBatch(
        version=version,
        tokens=np.frombuffer(b"".join(member.token_ids for member in group), TOKEN_DTYPE),
        lengths=lengths,
        generated=generated,
        num_generated=num_generated,
        sampler=np.frombuffer(b"".join(member.logprobs for member in group), LOGPROB_DTYPE),
        advantages=np.zeros(rows, np.float32),
        mask=np.zeros(rows, np.bool_),
        fresh=np.zeros(rows, np.bool_),
        order=plan.order,
        micro_batch_sizes=plan.micro_batch_sizes,
        update_sizes=plan.update_sizes,
    )
