"""A trainer of a few bytes, and the same arithmetic on the log alone: whoever trains a record twice, or another one, has other weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_learner.commit.snapshot import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SnapshotFiles, file_names, read_snapshot
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.trainer import TrainResult
from echo_schemas.columns import LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.records import Coordinates, StepReport, Trajectory, WeightKind

VOCABULARY = 1000
START = hashlib.sha256(b"start").digest()

_TOTALS = {"num_tokens": 4.0, "num_response_tokens": 4.0, "num_sequences": 2.0, "num_not_finite": 0.0, "policy_loss": 0.5} | dict.fromkeys(
    ("log_ratio_sum", "log_ratio_square_sum", "log_ratio_max", "log_ratio_negated_max", "logprob_diff_max"), 0.0
)


def trained(weights: bytes, moments: bytes, tokens: bytes, advantages: npt.NDArray[np.float32]) -> bytes:
    """The weights after one step."""
    return hashlib.sha256(b"".join((weights, moments, tokens, advantages.tobytes()))).digest()


def moments_of(weights: bytes) -> bytes:
    """What an optimizer would keep beside the weights."""
    return hashlib.sha256(b"moments" + weights).digest()


class ModelTrainer:
    """Weights are a digest of every batch since the start. `by`: part of each snapshot, so that one made again would show."""

    vocabulary = VOCABULARY
    experts = None
    remembered = ()

    def __init__(self, by: str) -> None:
        self.weights = START
        self._moments = moments_of(START)
        self._by = by

    def step(self, batch: TrainingBatch) -> TrainResult:
        """Take the batch in."""
        self.weights = trained(self.weights, self._moments, batch.tokens.tobytes(), batch.advantages)
        self._moments = moments_of(self.weights)
        return TrainResult(totals=_TOTALS, grad_norms=(1.0,), compute_s=0.0, lr=1e-3)

    def snapshot(self, version: int, folder: Path) -> SnapshotFiles:
        """The weights, and who made the snapshot; whoever makes the first one makes the same."""
        folder.mkdir(parents=True)
        (folder / ADAPTER_WEIGHTS).write_bytes(self.weights)
        (folder / ADAPTER_CONFIG).write_bytes(self._snapshot_config(version))
        return read_snapshot(folder, version, WeightKind.LORA, file_names(WeightKind.LORA))

    def snapshot_sha256(self, version: int) -> str:
        """Of a snapshot, without making it."""
        return hashlib.sha256(self.weights + self._snapshot_config(version)).hexdigest()

    def _snapshot_config(self, version: int) -> bytes:
        return json.dumps({"by": self._by if version else "anybody"}).encode()

    def remember(self, version: int, at_most: int) -> None:
        """Nothing is compared."""

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[Any]:
        """Nothing is compared."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Two files, either of which may be torn."""
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(self.weights)
        (folder / "moments").write_bytes(self._moments)

    def load(self, folder: Path) -> None:
        """As it is: what is torn shows in the next weights."""
        self.weights = (folder / "weights").read_bytes()
        self._moments = (folder / "moments").read_bytes()

    def load_weights(self, folder: Path) -> None:
        """From a snapshot, with moments of its own."""
        self.weights = (folder / ADAPTER_WEIGHTS).read_bytes()
        self._moments = moments_of(self.weights)

    def close(self) -> None:
        """Nothing to end."""


def retrained(reports: Sequence[StepReport], trajectories: Mapping[Coordinates, Trajectory]) -> dict[int, bytes]:
    """The weights of every version, from the log alone."""
    weights = {0: START}
    for report in reports:
        assert report.batch is not None
        places = samples_of(report)
        samples = [trajectories[where] for where in places]
        advantages = np.repeat(np.frombuffer(report.batch.advantages, LOGPROB_DTYPE), [sample.num_generated for sample in samples])
        before = weights.get(report.version - 1, b"")
        weights[report.version] = trained(before, moments_of(before), b"".join(sample.token_ids for sample in samples), advantages)
    return weights


def samples_of(report: StepReport) -> list[Coordinates]:
    """Where the samples of a step lie."""
    assert report.batch is not None
    partitions = np.frombuffer(report.batch.partitions, TOKEN_DTYPE).tolist()
    offsets = np.frombuffer(report.batch.offsets, OFFSET_DTYPE).tolist()
    return [Coordinates(partition=partition, offset=offset) for partition, offset in zip(partitions, offsets, strict=True)]
