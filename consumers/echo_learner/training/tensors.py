"""A step's samples as tensors: what one micro-batch gives the model and the loss, and how far learner and sampler differ on each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from echo_learner.losses.interface import LossInputs
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.microbatches import MicroBatch

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """A micro-batch's token rows, as `LossInputs` takes them."""

    sampler: Tensor
    advantages: Tensor
    mask: Tensor
    fresh: Tensor
    recomputed: Tensor | None
    sequence_ids: Tensor
    sequence_lengths: Tensor


class Differences:
    """The differences of log-probabilities between learner and sampler on each fresh sample, summed on the rank of its micro-batch."""

    def __init__(self, num_samples: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, num_samples, dtype=torch.float64, device=device)

    def add(self, samples: MicroBatch, batch: LossInputs, fresh: Tensor) -> None:
        """`fresh` [T]: tokens of the version that starts the step."""
        counted = (batch.mask & fresh).double()
        values = torch.stack([(batch.start_of_step.double() - batch.sampler.double()).abs() * counted, counted])
        found = torch.zeros(2, len(samples), dtype=torch.float64, device=values.device).index_add_(1, batch.sequence_ids, values)
        self._sums[:, list(samples)] = found

    def over_ranks(self, world_size: int) -> npt.NDArray[np.float64]:
        """Each sample's mean a token [N], NaN for one without such tokens. A collective."""
        if world_size > 1:
            dist.all_reduce(self._sums)
        sums, counts = self._sums.cpu()
        found: npt.NDArray[np.float64] = torch.where(counts > 0, sums / counts, torch.nan).numpy()
        return found


class SampleTensors:
    """A batch's flat arrays, cut by sample."""

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self.num_generated = batch.num_generated
        self.num_samples = len(batch.lengths)
        self._token_starts = np.cumsum(batch.lengths) - batch.lengths
        self._row_starts = np.cumsum(batch.num_generated) - batch.num_generated

    def inputs(self, samples: MicroBatch) -> tuple[Tensor | None, ...]:
        """The arguments of `PolicyModel.forward`, `is_cut` and `experts` only if any token of the step has them; two tokens of padding for
        a rank without work."""
        batch = self._batch
        if not samples:
            one = torch.ones(1, dtype=torch.int64, device=self._device)
            return torch.zeros(1, 2, dtype=torch.int64, device=self._device), one * 0, one
        longest = int(batch.lengths[list(samples)].max())
        ids = np.zeros((len(samples), longest), np.int64)
        chosen = np.zeros((len(samples), longest), np.bool_)
        for row, sample in enumerate(samples):
            start, length = int(self._token_starts[sample]), int(batch.lengths[sample])
            ids[row, :length] = batch.tokens[start : start + length]
            chosen[row, :length] = batch.generated[start : start + length]
        more: list[npt.NDArray[Any] | None] = [batch.cut[self.row_indices(samples)]] if batch.cut.size else []
        if batch.experts.size:
            experts = np.full((*ids.shape, batch.experts.shape[1]), -1, np.int64)
            for row, sample in enumerate(samples):
                start, length = int(self._token_starts[sample]), int(batch.lengths[sample])
                experts[row, :length] = batch.experts[start : start + length]
            more = [*(more or [None]), experts]
        return tuple(None if array is None else torch.from_numpy(array).to(self._device) for array in (ids, *chosen.nonzero(), *more))

    def rows(self, samples: MicroBatch) -> TokenRows:
        """The micro-batch's token rows, in the order of `inputs`."""
        batch = self._batch
        lengths = batch.num_generated[list(samples)] if samples else np.zeros(0, np.int64)
        pick = self.row_indices(samples)

        def tensor(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

        return TokenRows(
            sampler=tensor(batch.sampler[pick]),
            advantages=tensor(batch.advantages[pick]),
            mask=tensor(batch.mask[pick]),
            fresh=tensor(batch.fresh[pick]),
            recomputed=tensor(batch.recomputed[pick]) if batch.recomputed.size else None,
            sequence_ids=tensor(np.repeat(np.arange(len(samples)), lengths)),
            sequence_lengths=tensor(lengths),
        )

    def row_indices(self, samples: MicroBatch) -> npt.NDArray[np.int64]:
        """Positions of the micro-batch's token rows among the batch's, in the order of `inputs`."""
        starts, lengths = self._row_starts[list(samples)], self.num_generated[list(samples)]
        return np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)] or [_NO_ROWS])
