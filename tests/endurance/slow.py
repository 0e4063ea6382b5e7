"""A reward that takes a tenth of a second for each sample."""

from __future__ import annotations

import asyncio

from echo_tasks.rewards import ScoredSample, reward

SECONDS = 0.1


@reward(name="slow")
async def slow(sample: ScoredSample) -> float:
    """Whether the completion has an even number of characters; so late that a run makes far more samples meanwhile."""
    await asyncio.sleep(SECONDS)
    return float(len(sample.completion) % 2 == 0)
