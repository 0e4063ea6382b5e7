"""Rewards as an application writes them, for the tests of what is shown and ordered."""

from __future__ import annotations

from dataclasses import replace

from echo_schemas.records import Coordinates, Reward, RewardOutcome
from echo_schemas.topics import REWARDS
from tests.examples import load_examples


def scored(name: str, of: Coordinates, *, value: float = 0.5, time_ms: int = 0, application: str = "brevity") -> Reward:
    example = next(record for record in load_examples(REWARDS).values() if isinstance(record, Reward))
    return replace(
        example,
        run_id="demo",
        group_id="demo/7",
        seq=7,
        name=name,
        of=of,
        application=application,
        outcome=RewardOutcome.SCORED,
        value=value,
        error=None,
        time_ms=time_ms,
    )


def failed(name: str, of: Coordinates, error: str, *, outcome: RewardOutcome = RewardOutcome.FAILED) -> Reward:
    return replace(scored(name, of), outcome=outcome, value=None, components={}, error=error)
