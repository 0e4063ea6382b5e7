"""The least change with which a rank of a learner fits into a GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echo_core.needs.memory import LearnerLoad, learner_memory
from echo_core.needs.model_shape import ModelShape

_RANKS = (2, 4, 8, 16, 32, 64)
_SPREAD = 3
"""The ZeRO stage that spreads weights, gradients and optimizer over the ranks."""


def least_change(shape: ModelShape, load: LearnerLoad, memory: float) -> LearnerLoad | None:
    """`load`, changed so that a rank takes `memory` bytes at most; None if nothing here does it.

    First recomputation alone, then ZeRO-3 over the fewest ranks, recomputed only if it has to be.

    Qwen3-8B, an adapter of rank 32, 16384 tokens, one rank: 142.6 GB; recomputed 31.7 GB, so 80 GB ask for no more than that. All weights
    of Qwen2.5-7B, 4096 tokens: one rank takes 181.9 GB, recomputed 155.4; each of two 106.5, recomputed 80.0; each of four 68.8. A GPU of
    70 GB: four ranks, not recomputed."""
    return next((changed for changed in _changes(load) if learner_memory(shape, changed).total <= memory), None)


def _changes(load: LearnerLoad) -> Iterator[LearnerLoad]:
    yield replace(load, recomputes=True)
    for ranks in (load.ranks, *(more for more in _RANKS if more > load.ranks)):
        # One rank has nobody to share with.
        if ranks > 1:
            spread = replace(load, ranks=ranks, stage=_SPREAD)
            yield spread
            yield replace(spread, recomputes=True)
