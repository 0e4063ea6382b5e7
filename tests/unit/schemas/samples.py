"""Records for tests, made in one line each."""

from __future__ import annotations

from typing import Any

from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import Coordinates, FinishReason, Purpose, Reward, RewardOutcome, Sampling, Span, Trajectory, VersionSpan


def trajectory(*, seq: int = 1, index: int = 0, version: int = 0, num_generated: int = 3, **changes: Any) -> Trajectory:
    """A valid trajectory of run `demo` with four prompt tokens."""
    end = 4 + num_generated
    fields: dict[str, Any] = {
        "run_id": "demo",
        "group_id": f"demo/{seq}",
        "seq": seq,
        "attempt": "a1",
        "index": index,
        "group_size": 4,
        "purpose": Purpose.TRAIN,
        "task": "reverse-digits",
        "prompt": "12",
        "completion": "21",
        "token_ids": pack_tokens(list(range(end))),
        "generated": (Span(start=4, end=end),),
        "logprobs": pack_logprobs([-0.5] * num_generated),
        "version_spans": (VersionSpan(start=4, end=end, version=version),),
        "min_version": version,
        "max_version": version,
        "weights_sha256": "0" * 64,
        "worker_id": "w1",
        "engine": "test",
        "sampling": Sampling(max_new_tokens=8),
        "finish_reason": FinishReason.STOP,
        "requested_ms": 1,
        "started_ms": 2,
        "finished_ms": 3,
    }
    return Trajectory(**{**fields, **changes})


def reward(*, seq: int = 1, index: int = 0, partition: int = 0, offset: int = 0, value: float | None = 1.0, **changes: Any) -> Reward:
    """A valid reward; scored when it has a value, failed when not."""
    fields: dict[str, Any] = {
        "run_id": "demo",
        "group_id": f"demo/{seq}",
        "seq": seq,
        "attempt": "a1",
        "index": index,
        "of": Coordinates(partition=partition, offset=offset),
        "name": "exact",
        "code_version": "1",
        "outcome": RewardOutcome.SCORED if value is not None else RewardOutcome.FAILED,
        "value": value,
        "time_ms": 4,
    }
    return Reward(**{**fields, **changes})
