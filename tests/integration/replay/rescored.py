"""Rewards of the rescore's tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from echo_tasks.rewards import ScoredSample, reward

CALLS = Path("calls")


@reward(name="misbehaves", timeout_s=1.0)
def misbehaves(sample: ScoredSample) -> Any:
    """Does what the sample says; 1 otherwise."""
    match sample.completion:
        case "raise":
            raise ValueError(sample.prompt)
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "exit":
            os._exit(3)
        case "memory":
            return len(b"x" * (8 << 30))
        case "fork":
            # Both processes return from here; only one of them may answer.
            return float(os.fork() >= 0)
        case "hang":
            if os.fork() == 0:
                Path(f"forked-{os.getpid()}").touch()
            time.sleep(3600)
    return 1.0


@reward(name="hangs", timeout_s=0.2)
def hangs(_: ScoredSample) -> float:
    """Nobody knows."""
    time.sleep(3600)
    return 1.0


@reward(name="slow")
def slow(sample: ScoredSample) -> float:
    """Notes each call in a file."""
    with CALLS.open("a") as file:
        file.write(f"{sample.token_ids.tolist()}\n")
    time.sleep(0.1)
    return 1.0
