"""The divisor of each token's loss, per optimizer update. Counts are of *unfiltered* tokens: a mask must not change the scale."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Normalisation(StrEnum):
    """`sequence`: mean over each sequence's tokens, then over sequences (ECHO-2 eq. 25). `token`: sum over all tokens / their number
    (DAPO, arXiv 2503.14476). `constant`: sum / a fixed number of tokens per sequence (Dr. GRPO, arXiv 2503.20783)."""

    SEQUENCE = "sequence"
    TOKEN = "token"  # noqa: S105  no password
    CONSTANT = "constant"


def sequence_scales(num_tokens: npt.NDArray[np.int64], kind: Normalisation, *, constant: int = 0) -> npt.NDArray[np.float64]:
    """The factor of every token of each sequence, shape [n], for one optimizer update of n sequences. Adding up scaled token losses over
    any partition into micro-batches gives the update's loss. Raises ValueError for an update without tokens, or `constant` without its
    number."""
    n = len(num_tokens)
    if n == 0 or num_tokens.sum() == 0:
        message = "An optimizer update without response tokens has no loss."
        raise ValueError(message)
    if kind is Normalisation.SEQUENCE:
        return np.divide(1.0, n * num_tokens, out=np.zeros(n), where=num_tokens > 0)
    if kind is Normalisation.TOKEN:
        return np.full(n, 1.0 / float(num_tokens.sum()))
    if constant < 1:
        message = "Normalisation `constant` needs its number of tokens per sequence."
        raise ValueError(message)
    return np.full(n, 1.0 / (n * constant))


class UpdateSplit(StrEnum):
    """What an optimizer update gets of a step. `groups`: whole groups (ECHO-2). `samples`: some samples of every group, so that each update
    sees all prompts, about as TRL's shuffling does."""

    GROUPS = "groups"
    SAMPLES = "samples"


def split_samples(group_sizes: Sequence[int], num_updates: int, split: UpdateSplit = UpdateSplit.GROUPS) -> list[list[int]]:
    """The samples of each update, ascending, of a batch whose samples lie group after group; every sample once, the updates as equal as
    possible. Raises ValueError for more updates than groups.

    Two groups of four samples, two updates: [0, 1, 2, 3], [4, 5, 6, 7]; or by samples [0, 2, 5, 7], [1, 3, 4, 6].
    """
    num_groups = len(group_sizes)
    if not 1 <= num_updates <= num_groups:
        message = f"{num_groups} groups cannot be split among {num_updates} updates."
        raise ValueError(message)
    updates: list[list[int]] = [[] for _ in range(num_updates)]
    sample = 0
    for group, size in enumerate(group_sizes):
        for place in range(size):
            # Of whole groups, update u has those from ⌊G·u / U⌋ on. By samples, each group begins with the next update, so that no update
            # stays empty, however few samples the groups have.
            update = ((group + 1) * num_updates - 1) // num_groups if split is UpdateSplit.GROUPS else (group + place) % num_updates
            updates[update].append(sample)
            sample += 1
    return updates
