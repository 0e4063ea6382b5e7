"""Records for the rules' tests, made in one line each."""

from __future__ import annotations

from typing import Any

from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.records import (
    Coordinates,
    FinishReason,
    Purpose,
    Reward,
    RewardOutcome,
    RewardTerm,
    Sampling,
    Span,
    Trajectory,
    VersionSpan,
    group_id_of,
)

GROUP_SIZE = 2
EXACT = (RewardTerm(name="exact", weight=1.0),)


def trajectory(seq: int = 0, index: int = 0, *, attempt: str = "a", version: int = 0, **changes: Any) -> Trajectory:
    """A valid training sample of run `demo`, in groups of two."""
    purpose = changes.get("purpose", Purpose.TRAIN)
    run_id = changes.get("run_id", "demo")
    fields: dict[str, Any] = {
        "run_id": run_id,
        "group_id": group_id_of(run_id, seq, purpose),
        "seq": seq,
        "attempt": attempt,
        "index": index,
        "group_size": GROUP_SIZE,
        "purpose": purpose,
        "task": "t",
        "prompt": "p",
        "completion": "c",
        "token_ids": pack_tokens([1, 2, 3]),
        "generated": (Span(start=1, end=3),),
        "logprobs": pack_logprobs([-0.5, -0.5]),
        "version_spans": (VersionSpan(start=1, end=3, version=version),),
        "min_version": version,
        "max_version": version,
        "weights_sha256": "0" * 64,
        "worker_id": "w",
        "engine": "e",
        "sampling": Sampling(max_new_tokens=8),
        "finish_reason": FinishReason.STOP,
        "requested_ms": 1,
        "started_ms": 2,
        "finished_ms": 3,
    }
    return Trajectory(**{**fields, **changes})


def reward(of: Coordinates, seq: int = 0, *, value: float | None = 1.0, name: str = "exact", **changes: Any) -> Reward:
    """A reward for the record at `of`; scored if it has a value."""
    fields: dict[str, Any] = {
        "run_id": "demo",
        "group_id": f"demo/{seq}",
        "seq": seq,
        "attempt": "a",
        "index": 0,
        "of": of,
        "name": name,
        "code_version": "1",
        "outcome": RewardOutcome.SCORED if value is not None else RewardOutcome.FAILED,
        "value": value,
        "time_ms": 4,
    }
    return Reward(**{**fields, **changes})


def at(offset: int, partition: int = 0) -> Coordinates:
    """A place in a log."""
    return Coordinates(partition=partition, offset=offset)
