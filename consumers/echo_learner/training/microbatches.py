"""How a step's samples are cut into optimizer updates and micro-batches.

    batch (groups) ──► updates: disjoint, whole groups or some samples of each ──► micro-batches: whole samples within a token budget

Pure and deterministic: the same batch gives the same plan on every rank and in every replay. The plan changes memory and time only: every
micro-batch divides its loss by the counts of the whole update (`echo_core.normalisation`), so the gradients add up to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_core.normalisation import UpdateSplit, split_samples

MicroBatch = tuple[int, ...]
"""Sample indices that go through the model together. Empty: a rank without work in a round, which runs a dummy of weight zero."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The updates of a step, each a tuple of micro-batches, each a tuple of sample indices; every sample occurs once."""

    updates: tuple[tuple[MicroBatch, ...], ...]

    @property
    def order(self) -> npt.NDArray[np.int32]:
        """Sample indices in training order, [N]: the column `order` of a StepReport's batch."""
        return np.array([sample for update in self.updates for samples in update for sample in samples], np.int32)

    @property
    def micro_batch_sizes(self) -> npt.NDArray[np.int32]:
        """Samples per micro-batch in training order, [M]: the column `micro_batches`."""
        return np.array([len(samples) for update in self.updates for samples in update], np.int32)

    @property
    def update_sizes(self) -> npt.NDArray[np.int32]:
        """Micro-batches per update, [U]: the column `updates`."""
        return np.array([len(update) for update in self.updates], np.int32)


def plan_micro_batches(
    lengths: Sequence[int], group_sizes: Sequence[int], *, num_updates: int, max_tokens: int, split: UpdateSplit = UpdateSplit.GROUPS
) -> MicroBatchPlan:
    """Cut a batch, whose samples lie group after group, into updates and micro-batches.

    `lengths` [N]: tokens of each sample, prompt and answer, since that is what the model reads. Whole groups are split in their order,
    oldest first. A micro-batch lies in memory as rows of its longest sample's length, and has `max_tokens` of them at most; a sample
    above it stands alone, none is ever split. Raises ValueError if there are fewer groups than updates, or if the group sizes do not add
    up.
    """
    if sum(group_sizes) != len(lengths) or any(size < 1 for size in group_sizes):
        raise ValueError(f"Groups of {list(group_sizes)} samples do not make up {len(lengths)} samples.")
    updates = split_samples(group_sizes, num_updates, split)
    longest_first = (sorted(samples, key=lambda sample: (-lengths[sample], sample)) for samples in updates)
    return MicroBatchPlan(tuple(_cut(samples, lengths, max_tokens) for samples in longest_first))


def restore_plan(order: Sequence[int], micro_batch_sizes: Sequence[int], update_sizes: Sequence[int]) -> MicroBatchPlan:
    """The plan in a StepReport's columns, so that a replay repeats it. Raises ValueError if the columns contradict each other."""
    if sum(micro_batch_sizes) != len(order) or sum(update_sizes) != len(micro_batch_sizes):
        raise ValueError(
            f"{len(order)} samples, micro-batches of {sum(micro_batch_sizes)} and updates of {sum(update_sizes)} "
            f"of {len(micro_batch_sizes)} micro-batches do not fit together."
        )
    if sorted(order) != list(range(len(order))):
        raise ValueError("The training order does not name every sample once.")
    samples, sizes = iter(order), iter(micro_batch_sizes)
    return MicroBatchPlan(tuple(tuple(tuple(int(next(samples)) for _ in range(next(sizes))) for _ in range(n)) for n in update_sizes))


def deal_to_ranks(micro_batches: Sequence[MicroBatch], num_ranks: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of each rank for one update, equally many, the last round filled with empty ones.

    Under ZeRO-3 every forward pass is a collective, so all ranks must run equally many. Dealing in order puts
    neighbours, which cost about the same, into the same round.
    """
    num_rounds = -(-len(micro_batches) // num_ranks)
    filled = [*micro_batches, *[()] * (num_rounds * num_ranks - len(micro_batches))]
    return tuple(tuple(filled[rank::num_ranks]) for rank in range(num_ranks))


def _cut(samples: Sequence[int], lengths: Sequence[int], max_tokens: int) -> tuple[MicroBatch, ...]:
    """Runs of neighbours in order of length, longest first: little padding, and a batch too large for memory fails at once."""
    cut: list[list[int]] = []
    for sample in samples:
        if cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= max_tokens:
            cut[-1].append(sample)
        else:
            cut.append([sample])
    return tuple(map(tuple, cut))
