"""The benchmarks' trajectories: distinct random tokens and log-probabilities, so that compression has nothing to win."""

from __future__ import annotations

import numpy as np

from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import FinishReason, Purpose, Sampling, Span, Trajectory, VersionSpan

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
