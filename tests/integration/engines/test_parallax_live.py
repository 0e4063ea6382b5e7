"""A Parallax cluster that somebody has: ECHO_PARALLAX_URL=http://host:3001 ECHO_PARALLAX_BASE=/models/…, the folder of the model it serves.

Nothing is loaded into it: it generates with the weights that it has.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from echo_rollout.engines.engine import EngineConfig, Snapshot, SnapshotRef
from echo_schemas.records import Sampling, WeightKind

_URL, _BASE = os.environ.get("ECHO_PARALLAX_URL", ""), os.environ.get("ECHO_PARALLAX_BASE", "")


@pytest.mark.skipif(not (_URL and _BASE), reason="ECHO_PARALLAX_URL and ECHO_PARALLAX_BASE name no cluster")
def test_a_live_cluster_answers_in_a_dialect_that_can_be_trained_on() -> None:
    from echo_rollout.engines.catalogue import open_engine
    from echo_rollout.engines.chat_text import ChatText
    from echo_tasks.prompts import vocabulary_size

    base = Path(_BASE)
    config = EngineConfig(
        base=base, kind=WeightKind.FULL, dtype="bfloat16", max_length=256, lora_rank=8, concurrency=8,
        options={"url": _URL, "weights": "external", "start_timeout_s": 30.0},
    )  # fmt: skip

    async def run() -> None:
        engine = open_engine("parallax", config)
        try:
            await engine.start()
            await engine.install(Snapshot(ref=SnapshotRef(version=0, sha256="0" * 64), kind=WeightKind.FULL, folder=base))
            prompt, _ = ChatText(base).sample(vocabulary_size(base))
            group = await engine.generate(prompt, 4, Sampling(max_new_tokens=16))
            assert len(group) == 4
            assert all(1 <= len(generation.token_ids) <= 16 for generation in group)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), timeout=300))
