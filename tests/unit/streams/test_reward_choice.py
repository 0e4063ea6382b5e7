"""Evaluations are judged by their own rewards, training by the run's, in one application."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from echo_bus.clock import ManualClock
from echo_core.evaluation import EVALUATION
from echo_schemas.records import Coordinates, Purpose
from echo_settings import Settings
from echo_settings.sections import ScoringSettings
from echo_streams.metrics import StreamsMetrics
from echo_streams.run import all_rewards, choice_of
from echo_streams.scoring import Judgeable, RewardChoice, Scorer
from echo_tasks.rewards import ScoredSample
from tests.unit.core.records import trajectory
from tests.unit.streams.stage import attached


def one(sample: ScoredSample) -> float:
    return 1.0


def judged(choice: RewardChoice | None, *metadata: dict[str, str] | None) -> list[set[str]]:
    """For each trajectory the names of what judged it; None is one of training."""
    scorer = Scorer(
        [attached(one, "exact"), attached(one, "shown")],
        run_id="demo",
        limits=ScoringSettings(),
        metrics=StreamsMetrics(),
        clock=ManualClock(),
        choice=choice,
    )
    items = []
    for offset, given in enumerate(metadata):
        purpose = Purpose.TRAIN if given is None else Purpose.EVAL
        found: Any = replace(trajectory(offset, purpose=purpose), metadata=given or {})
        items.append(Judgeable(trajectory=found, at=Coordinates(partition=0, offset=offset)))
    rewards = asyncio.run(scorer.score(items))
    return [{reward.name for reward in rewards if reward.of == item.at} for item in items]


def test_each_evaluation_is_judged_by_its_own_rewards_and_an_unknown_one_as_the_run_is() -> None:
    choice = RewardChoice(run=frozenset({"exact"}), evaluations={"hard": frozenset({"shown"}), "both": frozenset({"exact", "shown"})})
    found = judged(choice, None, {EVALUATION: "hard"}, {EVALUATION: "both"}, {EVALUATION: "ordered"}, {}, None)
    assert found == [{"exact"}, {"shown"}, {"exact", "shown"}, {"exact"}, {"exact"}, {"exact"}]
    assert judged(None, None, {EVALUATION: "hard"}) == [{"exact", "shown"}] * 2


def test_the_file_says_which_rewards_are_attached_and_whether_there_is_anything_to_choose() -> None:
    plain = Settings.model_validate({"rewards": {"exact": 1.0}, "eval": [{"name": "same"}]})
    assert all_rewards(plain) == ("exact",)
    assert choice_of(plain) is None
    other = Settings.model_validate({"rewards": {"exact": 1.0}, "eval": [{"name": "hard", "rewards": ["shown"]}, {"name": "same"}]})
    assert all_rewards(other) == ("exact", "shown")
    assert choice_of(other) == RewardChoice(
        run=frozenset({"exact"}), evaluations={"hard": frozenset({"shown"}), "same": frozenset({"exact"})}
    )
