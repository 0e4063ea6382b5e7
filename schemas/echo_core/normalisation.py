"""The divisor of each token's loss, per optimizer update. Counts are of *unfiltered* tokens: a mask must not change the scale."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

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


def split_groups(num_groups: int, num_updates: int) -> list[range]:
    """Disjoint ranges of groups, one for each optimizer update, as equal as possible. Raises ValueError for more updates than groups."""
    if not 1 <= num_updates <= num_groups:
        message = f"{num_groups} groups cannot be split among {num_updates} updates."
        raise ValueError(message)
    bounds = [num_groups * update // num_updates for update in range(num_updates + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]
