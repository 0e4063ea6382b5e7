"""An engine that lacks something does not start unless the run's file says so, and then it is in the log."""

from __future__ import annotations

import logging

import pytest

from echo_rollout.engines.acceptance import check_capabilities
from echo_rollout.engines.engine import EngineCapabilities, Switch
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobSource
from echo_settings.sections import RolloutSettings

WHOLE = EngineCapabilities(name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8)
UNSAID = EngineCapabilities(
    name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8, logprobs=LogprobSource.RECOMPUTED
)  # fmt: skip
UNPROVED = EngineCapabilities(name="e", lora=True, full=False, switch=Switch.KEEPS, max_tokens=8, proves_version=False)


def test_an_engine_that_lacks_nothing_is_let_through_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_capabilities(WHOLE, RolloutSettings())
    assert not caplog.records


@pytest.mark.parametrize(
    ("lacking", "sentence", "allowed"),
    [
        (UNSAID, "cannot say how likely", {"missing_logprobs": "recompute"}),
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
