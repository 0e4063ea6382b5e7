"""What some conditions add to a run, by import path: a loss without correction, a remote engine, a slow reward."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from echo_learner.losses.config import GrpoTis
from echo_rollout.engines.catalogue import open_engine
from echo_rollout.engines.engine import Engine, EngineCapabilities, EngineConfig, Generation, Snapshot, SnapshotRef
from echo_schemas.records import Sampling
from echo_tasks.rewards import ScoredSample, reward

if TYPE_CHECKING:
    from echo_learner.losses.interface import LossInputs, LossOutputs

_SECONDS = "seconds"
_INNER = "engine"
# The least and most seconds until a reward.
_LATE_S = (1.0, 4.0)


def uncorrected(batch: LossInputs) -> LossOutputs:
    """The default loss with the policy at the start of the step as the sampler: each token has the weight 1, at any age."""
    from echo_learner.losses.functions import grpo_tis

    return grpo_tis(replace(batch, sampler=batch.start_of_step), GrpoTis())


@reward(name="late", timeout_s=60.0)
async def late(sample: ScoredSample) -> float:
    """0 after one to four seconds, by the sample: it does not change the sum, but the group waits for it."""
    least, most = _LATE_S
    await asyncio.sleep(least + (most - least) * (zlib.crc32(sample.token_ids.tobytes()) % 1000) / 1000)
    return 0.0


class Elsewhere:
    """An engine whose groups take `seconds` each, like those of workers on other machines. `engine`: the engine that generates. See
    `Engine`. It generates on this machine, which a remote worker would not, so a run with remote workers would be at least as fast."""

    def __init__(self, config: EngineConfig) -> None:
        options = dict(config.options)
        self._seconds = float(str(options.pop(_SECONDS)))
        self._inner: Engine = open_engine(str(options.pop(_INNER, "vllm")), replace(config, options=options))

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._inner.capabilities

    @property
    def installed(self) -> SnapshotRef | None:
        return self._inner.installed

    @property
    def in_use(self) -> frozenset[int]:
        return self._inner.in_use

    async def start(self) -> None:
        await self._inner.start()

    async def install(self, snapshot: Snapshot) -> None:
        await self._inner.install(snapshot)

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        until_s = time.monotonic() + self._seconds
        found = await self._inner.generate(prompt, n, sampling)
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        return found

    async def close(self) -> None:
        await self._inner.close()
