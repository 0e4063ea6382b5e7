"""An engine without a model whose speed a file says, and which hangs while another file is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from echo_rollout.engines import scripted
from echo_rollout.engines.engine import EngineConfig, Generation
from echo_schemas.records import Sampling

_LOOK_S = 0.1


class GovernedEngine(scripted.PacedEngine):
    """`governor` of [rollout.options]: a file with the seconds of a group. A file beside it that ends in `.hangs`: no group ends."""

    def __init__(self, config: EngineConfig) -> None:
        self._governor = Path(str(config.options["governor"]))
        super().__init__(config)

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """By the script, at the speed of this moment."""
        self._seconds = float(self._governor.read_text(encoding="utf-8"))
        while self._governor.with_suffix(".hangs").exists():
            await asyncio.sleep(_LOOK_S)
        return await super().generate(prompt, n, sampling)
