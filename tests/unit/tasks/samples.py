"""A sample as reward functions see it, made of the text that a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_schemas.records import FinishReason
from echo_tasks.rewards import ScoredSample


def sample(completion: str, entry: Mapping[str, Any] | None = None) -> ScoredSample:
    """One completion and the entry of its prompt."""
    return ScoredSample(
        prompt="?",
        completion=completion,
        entry=entry or {},
        token_ids=np.array([1, 2, 3], np.int32),
        num_generated=2,
        turn_rewards=(),
        finish_reason=FinishReason.STOP,
        metadata={},
        task="t",
    )
