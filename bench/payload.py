"""The benchmarks' records. Trajectories have distinct random tokens and log-probabilities, so that compression cannot shrink them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import (
    Coordinates,
    FinishReason,
    Purpose,
    Reward,
    RewardOutcome,
    Sampling,
    Span,
    Trajectory,
    VersionSpan,
    WeightFile,
    WeightKind,
    WeightManifest,
)

PROMPT_TOKENS = 128
GROUP_SIZE = 16
_VOCABULARY = 150_000


def make_trajectories(count: int, num_tokens: int, run_id: str = "bench") -> list[Trajectory]:
    """`count` trajectories of `num_tokens` tokens, in groups of 16."""
    dice = np.random.default_rng(0)
    prompt = min(PROMPT_TOKENS, num_tokens // 2)
    made = []
    for number in range(count):
        seq, index = divmod(number, GROUP_SIZE)
        made.append(
            Trajectory(
                run_id=run_id,
                group_id=f"{run_id}/{seq}",
                seq=seq,
                attempt=f"{seq:016x}",
                index=index,
                group_size=GROUP_SIZE,
                purpose=Purpose.TRAIN,
                task="bench",
                entry='{"answer": "42"}',
                prompt="What is six times seven? Think step by step.",
                completion="Six times seven is forty-two.",
                token_ids=pack_tokens(dice.integers(0, _VOCABULARY, num_tokens)),
                generated=(Span(start=prompt, end=num_tokens),),
                logprobs=pack_logprobs(-dice.random(num_tokens - prompt)),
                version_spans=(VersionSpan(start=prompt, end=num_tokens, version=12),),
                min_version=12,
                max_version=12,
                weights_sha256="ab" * 32,
                worker_id="worker-1",
                engine="bench",
                sampling=Sampling(max_new_tokens=num_tokens),
                finish_reason=FinishReason.STOP,
                requested_ms=1_763_700_000_000,
                started_ms=1_763_700_000_100,
                finished_ms=1_763_700_000_900,
            )
        )
    return made


def make_reward(seq: int, index: int, place: tuple[int, int], value: float = 1.0) -> Reward:
    """The reward `exact` of the sample `index` of group `seq`, whose record lies at `place`."""
    return Reward(
        run_id="bench",
        group_id=f"bench/{seq}",
        seq=seq,
        attempt=f"{seq:016x}",
        index=index,
        of=Coordinates(partition=place[0], offset=place[1]),
        name="exact",
        code_version="1",
        outcome=RewardOutcome.SCORED,
        value=value,
        time_ms=1,
    )


def make_manifest(
    version: int, files: Mapping[str, bytes], *, run_id: str = "bench", kind: WeightKind = WeightKind.LORA, **rest: Any
) -> WeightManifest:
    """The manifest of a snapshot of `files`. `rest`: other fields, such as `blob`."""
    whole = b"".join(files.values())
    others = {"session": "bench", "checkpoint": "bench", "next_seq": 0, "created_ms": time.time_ns() // 1_000_000}
    return WeightManifest(
        run_id=run_id,
        version=version,
        kind=kind,
        files=tuple(WeightFile(name=name, num_bytes=len(content), sha256=_sha256(content)) for name, content in files.items()),
        num_bytes=len(whole),
        sha256=_sha256(whole),
        **{**others, **rest},
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
