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
