"""What a backfill costs is said before it begins."""

from __future__ import annotations

import pytest

from echo_ops.cli import attach as attach_command
from echo_ops.rewards.trial import Trial
from tests.unit.core.records import at, reward


def test_a_backfill_names_seconds_and_money(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [reward(at(number), components={"cost_usd": 0.01 * number}) for number in range(3)]
    trial = Trial(rewards=rewards, seconds=4.0, num_timed=2)
    monkeypatch.setattr(attach_command, "as_time", lambda _bus, _begins: "2026-11-20T10:00")
    monkeypatch.setattr(attach_command, "offsets_of", lambda _bus, _begins: {})
    monkeypatch.setattr(attach_command, "num_between", lambda _bus, _offsets: 1_000)
    attach_command.say_beginning(None, "group", "version:3", 0.5, trial)  # type: ignore[arg-type]  # the log is replaced above
    assert capsys.readouterr().out == "From version:3: 500 trajectories (50% of 1,000), about 1,000 s of scoring and $5.00\n"


def test_answers_of_a_cache_do_not_make_the_others_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [reward(at(number), components={"cost_usd": 0.02, "cached": 0.0}) for number in range(2)]
    cached = [reward(at(number), components={"cost_usd": 0.0, "cached": 1.0}) for number in range(2, 8)]
    trial = Trial(rewards=[*asked, *cached], seconds=1.0, num_timed=7)
    assert trial.usd_per_sample == 0.02
    attach_command.say_trial(trial)
    assert "6 of 8 tried samples were answered by the judge's cache; others take longer\n" in capsys.readouterr().out
    attach_command.say_trial(Trial(rewards=cached, seconds=1.0, num_timed=5))
    assert (
        "6 of 6 tried samples were answered by the judge's cache; others take longer, and what they cost is not" in capsys.readouterr().out
    )
