"""An engine that lacks something does not start unless the run's file says so, and then it is in the log."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from echo_rollout.engines.engine import EngineCapabilities, Switch, check_capabilities
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobDistribution, LogprobSource
from echo_settings.sections import RolloutSettings

WHOLE = EngineCapabilities(name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8)
UNSAID = EngineCapabilities(
    name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8, logprobs=LogprobSource.RECOMPUTED
)  # fmt: skip
UNPROVED = EngineCapabilities(name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8, proves_version=False)

RAW = EngineCapabilities(
    name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8, distribution=LogprobDistribution.FULL, before_temperature=True
)  # fmt: skip


def test_an_engine_that_lacks_nothing_is_let_through_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_capabilities(WHOLE, RolloutSettings())
    assert not caplog.records


@pytest.mark.parametrize(
    ("lacking", "sentence", "allowed"),
    [
        (UNSAID, "gives no log-probabilities", {"missing_logprobs": "recompute"}),
        (UNPROVED, "cannot prove which version", {"unproved_versions": "allow"}),
    ],
)
def test_one_that_lacks_something_is_refused_or_logged(
    lacking: EngineCapabilities, sentence: str, allowed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=sentence) as raised:
        check_capabilities(lacking, RolloutSettings())
    ((key, value),) = allowed.items()
    assert f'{key} = "{value}"' in raised.value.hint
    check_capabilities(lacking, RolloutSettings.model_validate(allowed))
    assert sentence in caplog.text


def test_allowing_one_thing_allows_no_other() -> None:
    with pytest.raises(UserError, match="cannot prove"):
        check_capabilities(UNPROVED, RolloutSettings(missing_logprobs="recompute"))


@pytest.mark.parametrize("cut", [{"top_p": 0.95}, {"top_k": 20}, {"min_p": 0.05}])
def test_cut_sampling_wants_log_probabilities_of_either_distribution(cut: dict[str, float]) -> None:
    for capable in (WHOLE, RAW):
        check_capabilities(capable, RolloutSettings.model_validate(cut))
    for rollout in ({**cut, "missing_logprobs": "recompute"}, {**cut, "missing_logprobs": "recompute", "temperature": 0.7}):
        with pytest.raises(UserError, match=r"With \[rollout\] top_p, top_k or min_p it has to") as raised:
            check_capabilities(RAW if "temperature" in rollout else UNSAID, RolloutSettings.model_validate(rollout))
        assert "--logprobs-mode processed_logprobs" in raised.value.hint


def test_log_probabilities_before_temperature_count_at_temperature_1_alone() -> None:
    check_capabilities(RAW, RolloutSettings())
    with pytest.raises(UserError, match="gives no log-probabilities"):
        check_capabilities(RAW, RolloutSettings(temperature=0.7))


def test_experts_are_replayed_only_where_the_engine_can_say_them() -> None:
    check_capabilities(replace(WHOLE, experts=True), RolloutSettings(), replays_experts=True)
    with pytest.raises(UserError, match="does not note which experts"):
        check_capabilities(WHOLE, RolloutSettings(), replays_experts=True)
