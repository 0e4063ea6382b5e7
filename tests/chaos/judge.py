"""A judge that takes its time, so that a run under faults does not eat up two cores that other tests run on."""

from __future__ import annotations

import asyncio

from echo_tasks.rewards import ScoredSample, reward

# One call at a time ([scoring] concurrency) makes that one step of sixteen samples a second at most.
_TAKES_S = 0.06


@reward(name="patient")
async def patient(sample: ScoredSample) -> float:
    """The same for everybody: nothing is learned from it."""
    del sample
    await asyncio.sleep(_TAKES_S)
    return 0.0
