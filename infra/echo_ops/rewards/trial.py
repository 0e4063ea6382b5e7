"""A reward function tried on recent trajectories, with the limits of the reward application, without a consumer group.

Threads: everything blocks the caller; functions run in a process of their own, or on an event loop of the caller's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_schemas.records import Reward, RewardOutcome
from echo_settings import Settings
from echo_streams.batching import MAX_BATCH
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import ScoringPool
from echo_streams.scoring import Attached, Judgeable, Scorer
from echo_tasks.rewards import CACHED, COST, RewardKind

# A function that fails for its first sample gets this many more before the trial ends.
_MORE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The rewards of `items`, in their order. `seconds`: wall time for `num_timed` of them, without the first call."""

    items: Sequence[Judgeable] = ()
    rewards: Sequence[Reward] = ()
    seconds: float = 0.0
    num_timed: int = 0

    @property
    def failed(self) -> list[Reward]:
        """Rewards without a value."""
        return [each for each in self.rewards if each.outcome is not RewardOutcome.SCORED]

    @property
    def values(self) -> list[float]:
        """Values of the scored samples."""
        return [each.value for each in self.rewards if each.value is not None]

    @property
    def num_cached(self) -> int:
        """Samples that a judge's cache answered: these took no time and cost nothing."""
        return sum(each.components.get(CACHED, 0.0) > 0.0 for each in self.rewards)

    @property
    def usd_per_sample(self) -> float:
        """Mean cost of a sample that no cache answered, if the function reports it."""
        return sum(each.components.get(COST, 0.0) for each in self.rewards) / max(1, len(self.rewards) - self.num_cached)

    @property
    def s_per_sample(self) -> float | None:
        """Seconds a sample; None if no call was timed."""
        return self.seconds / self.num_timed if self.num_timed else None


def try_reward(settings: Settings, bus: Bus, entry: Attached, items: Sequence[Judgeable]) -> Trial:
    """Score `items` with `entry`. The trial ends early if the first four samples get no value.

    Raises UserError if a process cannot import the function.
    """
    # The result has every failure, so the notices of a long-running process are not needed.
    logging.getLogger("echo_runtime.notices").setLevel(logging.ERROR)
    return asyncio.run(_try(settings, bus, entry, items)) if items else Trial()


async def _try(settings: Settings, bus: Bus, entry: Attached, items: Sequence[Judgeable]) -> Trial:
    scoring, metrics = settings.scoring, StreamsMetrics()
    pool = None
    if entry.function.kind is not RewardKind.ASYNC:
        num = max(1, scoring.processes)
        pool = ScoringPool([entry.function], num_processes=num, metrics=metrics, memory_mb=scoring.memory_mb)
    limits = scoring.model_copy(update={"retries": 0})
    scorer = Scorer([entry], run_id=settings.run.name, limits=limits, metrics=metrics, clock=bus.clock, pool=pool)
    try:
        if pool is not None:
            await pool.start()
        rewards = await scorer.score(items[:1])
        if rewards[0].outcome is not RewardOutcome.SCORED:
            rewards += await scorer.score(items[1 : 1 + _MORE])
            if all(each.outcome is not RewardOutcome.SCORED for each in rewards):
                return Trial(items=items[: len(rewards)], rewards=rewards)
        rest = items[len(rewards) :]
        started_s = time.perf_counter()
        for first in range(0, len(rest), MAX_BATCH):
            rewards += await scorer.score(rest[first : first + MAX_BATCH])
        return Trial(items=items, rewards=rewards, seconds=time.perf_counter() - started_s, num_timed=len(rest))
    finally:
        if pool is not None:
            pool.close()
