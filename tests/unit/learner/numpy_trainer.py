"""A trainer of a few bytes: what it learned is a digest of what it was given. Imports torch by way of the learner's types."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_learner.commit.snapshot import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SnapshotFiles, file_names, read_snapshot
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.trainer import TrainResult
from echo_schemas.records import WeightKind

VOCABULARY = 32

_TOTALS = {"num_tokens": 4.0, "num_response_tokens": 4.0, "num_sequences": 2.0, "num_not_finite": 0.0, "policy_loss": 0.5} | {
    "log_ratio_sum": np.log(4.0), "log_ratio_square_sum": np.log(4.0), "log_ratio_max": 0.0, "log_ratio_negated_max": 0.0,
    "logprob_diff_max": 0.0,
}  # fmt: skip


class NumpyTrainer:
    """Weights are a digest of every batch since the start, so equal weights mean an equal past. `by`: part of each snapshot's bytes,
    so that a snapshot made again by another process would show."""

    def __init__(self, by: str = "first") -> None:
        self.weights = b"start"
        self.batches: list[TrainingBatch] = []
        self.closed = False
        self._by = by

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def experts(self) -> None:
        return None

    @property
    def remembered(self) -> Collection[int]:
        return ()

    def step(self, batch: TrainingBatch) -> TrainResult:
        digest = hashlib.sha256(self.weights)
        for _, array in sorted(batch.arrays().items()):
            digest.update(np.ascontiguousarray(array).tobytes())
        self.weights = digest.digest()
        self.batches.append(batch)
        return TrainResult(totals=_TOTALS, grad_norms=(1.0,), compute_s=0.0, lr=1e-3)

    def snapshot(self, version: int, folder: Path) -> SnapshotFiles:
        folder.mkdir(parents=True)
        (folder / ADAPTER_WEIGHTS).write_bytes(self.weights)
        (folder / ADAPTER_CONFIG).write_bytes(self._snapshot_config)
        return read_snapshot(folder, version, WeightKind.LORA, file_names(WeightKind.LORA))

    @property
    def snapshot_sha256(self) -> str:
        """Of a snapshot, without making it."""
        return hashlib.sha256(self.weights + self._snapshot_config).hexdigest()

    @property
    def _snapshot_config(self) -> bytes:
        return json.dumps({"by": self._by}).encode()

    def remember(self, version: int, at_most: int) -> None:
        pass

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[Any]:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(self.weights)

    def load(self, folder: Path) -> None:
        self.weights = (folder / "weights").read_bytes()

    def load_weights(self, folder: Path) -> None:
        self.weights = (folder / ADAPTER_WEIGHTS).read_bytes()

    def close(self) -> None:
        self.closed = True
