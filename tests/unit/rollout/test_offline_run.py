"""From a file to groups: which lines are named and counted, what is refused, and what the process asks of its settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from echo_rollout.metrics import OfflineMetrics
from echo_rollout.offline.episodes import read_episodes
from echo_rollout.offline.run import load_groups, run_offline
from echo_runtime.process import RoleProcess
from echo_schemas.errors import UserError
from echo_settings import Settings
from echo_settings.sections import RunSettings

TOKENS = ["<pad>", "<eos>", *"0123456789>"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tokenizer of digits and a configuration, as a model folder has them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "base"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(TOKENS), "eos_token_id": 1}), encoding="utf-8")
    return folder


def settings_of(base: Path, **more: Any) -> Settings:
    return Settings.model_validate(
        {"policy": {"base": str(base), "max_length": 12}, "rollout": {"group_size": 2}, "offline": {"plain": True}, **more}
    )


def hand(*contents: str, **fields: Any) -> str:
    """Users and assistants in turns."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]
    return json.dumps({"messages": messages, "return": 1, **fields})


def test_what_can_be_trained_is_grouped_and_the_rest_named_and_counted(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, registry = tmp_path / "hands.jsonl", CollectorRegistry()
    lines = [hand("2>", "0", "201>", "1"), "{", hand("1>", "1"), hand("1" * 20, "1"), hand("0>", "0", group="alone"), hand("0>", "1")]
    path.write_text("\n".join(lines), encoding="utf-8")
    with caplog.at_level(logging.INFO):
        groups = load_groups(read_episodes(path), settings_of(base), OfflineMetrics(registry))
    assert [[member.episode.line for member in group] for group in groups] == [[1, 3]]
    # 2 > 0 <eos> 2 0 1 > 1 <eos>
    assert groups[0][0].token_ids.tolist() == [4, 12, 2, 1, 4, 2, 3, 12, 3, 1]
    assert "hands.jsonl, line 4 is skipped (too_long): It has 22 tokens, above [policy] max_length = 12." in caplog.text
    assert "hands.jsonl: 1 groups of 2 episodes, 4 skipped" in caplog.text
    counts = {
        reason: registry.get_sample_value("echo_rollout_offline_skipped_total", {"reason": reason}) for reason in ("not_json", "alone")
    }
    assert counts == {"not_json": 1.0, "alone": 2.0}


def test_many_bad_lines_are_summed_up(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "hands.jsonl"
    path.write_text("\n".join(["{"] * 30 + [hand("2>", "0")] * 2), encoding="utf-8")
    load_groups(read_episodes(path), settings_of(base), OfflineMetrics(CollectorRegistry()))
    assert caplog.text.count("is skipped") == 20
    assert "30 episodes are skipped in all for the reason not_json" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"), [("", "It is empty."), ("{\n[]", "Line 1: The line is no JSON"), (hand("2>", "0"), "Line 1: It is the only")]
)
def test_a_file_without_a_group_is_refused(base: Path, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "hands.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"holds no group of episodes that can be trained\.") as caught:
        load_groups(read_episodes(path), settings_of(base), OfflineMetrics(CollectorRegistry()))
    assert words in caught.value.message


def test_a_process_without_episodes_or_with_a_learner_that_asks_says_so() -> None:
    def message_of(settings: Settings) -> str:
        process = cast("RoleProcess", SimpleNamespace(settings=settings))
        with pytest.raises(UserError) as caught:
            run_offline(process)
        return caught.value.message

    assert message_of(Settings()) == "No episodes are named."
    with pytest.raises(ValueError, match=r"\[offline\] episodes answer no request"):
        Settings.model_validate({"run": {"mode": "sequential"}, "offline": {"episodes": "x"}})
    process = cast("RoleProcess", SimpleNamespace(settings=Settings(run=RunSettings(mode="sequential"))))
    with pytest.raises(UserError, match="no answer to the request of a sequential learner"):
        run_offline(process, episodes=Path("hands.jsonl"))
    process = cast("RoleProcess", SimpleNamespace(settings=Settings()))
    with pytest.raises(UserError, match="The learner takes logged episodes only if") as caught:
        run_offline(process, episodes=Path("hands.jsonl"))
    assert "Set [offline] episodes" in caught.value.hint
