"""Rewards of the tests, copied into the folder that a reward application runs in."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from echo_tasks.rewards import ScoredSample, reward

GATE, BEGUN = Path("gate"), Path("begun")


@reward(name="short", version="2")
def brevity(sample: ScoredSample) -> float:
    """1 for an empty answer, less the longer it is."""
    return 1.0 / (1 + len(sample.completion))


@reward(name="patient")
async def patient(sample: ScoredSample) -> float:
    """Judges `slow` only once the file `gate` is there; says in `begun` that it was asked."""
    if sample.completion == "slow":
        BEGUN.touch()
        while not GATE.exists():
            await asyncio.sleep(0.02)
    return 1.0


@reward(name="stubborn")
def stubborn(sample: ScoredSample) -> float:
    """As `patient`, but without letting anything else go on meanwhile."""
    if sample.completion == "slow":
        BEGUN.touch()
        while not GATE.exists():
            time.sleep(0.02)
    return 1.0
