"""The page on logged episodes: its file is one that is read, its settings are settings, and every reason is explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from echo_rollout.offline.episodes import SkipReason, parse_episode
from echo_settings import Settings

PAGE = (Path(__file__).parents[3] / "docs" / "offline.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_line_that_is_shown_is_an_episode() -> None:
    episode = parse_episode(1, _block("json").strip().encode())
    assert [message.role for message in episode.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert (episode.turn_rewards, episode.group) == ((-20.0, 0.0), "hand 17")


def test_the_settings_that_are_shown_are_settings() -> None:
    settings = Settings.model_validate(tomllib.loads(_block("toml")))
    assert (settings.offline.episodes, settings.offline.epochs, settings.rollout.workers) == ("hands.jsonl", 2, 0)


def test_every_reason_for_which_a_line_is_skipped_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("| reason | what is wrong |", 1)[1], re.MULTILINE)
    assert rows == [reason.value for reason in SkipReason]
