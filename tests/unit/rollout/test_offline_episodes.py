"""Logged episodes: what a line may hold, why one is left out, which make a group, and how they become tokens and spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_rollout.offline.episodes import EpisodeRefused, SkipReason, into_groups, parse_episode, read_episodes
from echo_rollout.offline.rendering import ChatWording, ModelLimits, PlainWording, render_episode
from echo_schemas.errors import InvalidReason, InvalidRecord, UserError
from echo_schemas.records import ChatMessage
from echo_tasks.prompts import TokenIds

LIMITS = ModelLimits(vocabulary=512, max_length=200)
START, END = 300, 301


def line(*turns: tuple[str, str], **fields: Any) -> bytes:
    """A line of the file: (role, content) pairs, and a return of 1 unless rewards are given."""
    rewards = {} if {"rewards", "return"} & set(fields) else {"return": 1}
    messages = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"messages": messages, **rewards, **fields}).encode()


TWO_TURNS = (("system", "rules"), ("user", "one"), ("assistant", "call"), ("user", "two"), ("assistant", "fold"))


class ChatMl:
    """A tokenizer of bytes with two marks of its own, and a template in the manner of ChatML."""

    def encode(self, text: str) -> TokenIds:
        pieces: list[int] = []
        for piece in text.replace("<s>", "\0<s>\0").replace("<e>", "\0<e>\0").split("\0"):
            pieces += {"<s>": [START], "<e>": [END]}.get(piece, list(piece.encode()))
        return np.array(pieces, np.int32)

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        return "".join({START: "<s>", END: "<e>"}.get(int(token), chr(int(token) % 256)) for token in token_ids)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        if any("refuse" in message.content for message in messages):
            raise InvalidRecord(InvalidReason.HANDLER_REFUSED, "The chat template refused the messages.")
        return "".join(f"<s>{message.role}\n{message.content}<e>\n" for message in messages) + "<s>assistant\n"

    def render_reply(self, content: str) -> str:
        return f"<e>\n<s>user\n{content}<e>\n<s>assistant\n"


def refusal(raw: bytes) -> SkipReason:
    with pytest.raises(EpisodeRefused) as caught:
        parse_episode(1, raw)
    assert caught.value.message.endswith(".") or "no JSON" in caught.value.message
    return caught.value.reason


def test_an_episode_is_a_conversation_with_a_reward_for_each_answer() -> None:
    episode = parse_episode(7, line(*TWO_TURNS, rewards=[-20, 130.5], group=17, entry={"hand": "Ä"}))
    assert episode.line == 7
    assert [(message.role, message.content) for message in episode.messages] == list(TWO_TURNS)
    assert episode.turn_rewards == (-20.0, 130.5)
    assert (episode.group, json.loads(episode.entry)) == ("17", {"hand": "Ä"})


def test_bookkeeping_messages_do_no_harm() -> None:
    """ECHO-2 writes `Reward: r` as one more user message, also after the last answer."""
    episode = parse_episode(
        1,
        line(("user", "a"), ("assistant", "b"), ("user", "Reward: -20"), ("user", "State: c"), ("assistant", "d"), ("user", "Reward: 5")),
    )
    assert [message.content for message in episode.messages] == ["a", "b", "Reward: -20\nState: c", "d"]
    assert episode.turn_rewards == (1.0,)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", SkipReason.NOT_JSON),
        (b"{", SkipReason.NOT_JSON),
        (b"[]", SkipReason.NOT_JSON),
        (b"\xff\xfe", SkipReason.NOT_JSON),
        (b"[" * 100_000, SkipReason.NOT_JSON),
        (b"{}", SkipReason.NOT_MESSAGES),
        (b'{"messages": [], "return": 1}', SkipReason.NOT_MESSAGES),
        (b'{"messages": "hello", "return": 1}', SkipReason.NOT_MESSAGES),
        (b'{"messages": ["hello"], "return": 1}', SkipReason.NOT_MESSAGES),
        (b'{"messages": [{"role": "user", "content": null}], "return": 1}', SkipReason.NOT_MESSAGES),
        (line(("user", "a")), SkipReason.NO_ANSWER),
        (line(("system", "a")), SkipReason.NO_ANSWER),
        (line(("user", "a"), ("assistant", "")), SkipReason.NO_ANSWER),
        (line(("assistant", "a")), SkipReason.ROLE_ORDER),
        (line(("system", "a"), ("assistant", "b")), SkipReason.ROLE_ORDER),
        (line(("user", "a"), ("assistant", "b"), ("assistant", "c")), SkipReason.ROLE_ORDER),
        (line(("user", "a"), ("system", "b"), ("assistant", "c")), SkipReason.ROLE_ORDER),
        (line(("user", "a"), ("tool", "b"), ("assistant", "c")), SkipReason.ROLE_ORDER),
        (line(*TWO_TURNS, rewards=[1]), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, rewards=[1, "2"]), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, rewards=[1, True]), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, rewards=3), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, rewards=[1, float("nan")]), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, **{"return": float("inf")}), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, **{"return": 10**400}), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, **{"return": None}), SkipReason.BAD_REWARD),
        (line(*TWO_TURNS, **{"return": 1, "rewards": [1, 2]}), SkipReason.BAD_REWARD),
        (
            json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}).encode(),
            SkipReason.BAD_REWARD,
        ),
        (line(*TWO_TURNS, group=[1]), SkipReason.BAD_FIELD),
        (line(*TWO_TURNS, entry=[1]), SkipReason.BAD_FIELD),
        (line(("user", "a" * 500_000), ("assistant", "b")), SkipReason.TOO_LONG),
    ],
)
def test_what_is_no_episode_is_refused_with_a_reason(raw: bytes, reason: SkipReason) -> None:
    assert refusal(raw) is reason


def test_a_file_keeps_its_good_lines_and_names_the_others(tmp_path: Path) -> None:
    path = tmp_path / "hands.jsonl"
    good = line(("user", "a"), ("assistant", "b"))
    huge = line(("user", "a" * 1_000_000), ("assistant", "b"))
    path.write_bytes(b"\n".join([good, b"  ", b"{", huge, good]))
    file = read_episodes(path)
    assert [episode.line for episode in file.episodes] == [1, 5]
    assert [(each.line, each.reason) for each in file.skipped] == [(3, SkipReason.NOT_JSON), (4, SkipReason.TOO_LONG)]
    assert (file.name, len(file.sha256)) == ("hands.jsonl", 64)
    path.write_bytes(path.read_bytes() + b"\n")
    assert read_episodes(path).sha256 != file.sha256


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl cannot be read: No such file"):
        read_episodes(tmp_path / "missing.jsonl")


def test_groups_are_those_that_began_alike_and_the_rest_in_order() -> None:
    labels = ["x", None, "y", None, "x", None, None, "z", None]
    episodes = [parse_episode(number, line(("user", "a"), ("assistant", "b"), group=label)) for number, label in enumerate(labels, 1)]
    groups, alone = into_groups(episodes, 2)
    assert [[episode.line for episode in group] for group in groups] == [[1, 5], [2, 4], [6, 7]]
    assert sorted(each.line for each in alone) == [3, 8, 9]
    assert {each.reason for each in alone} == {SkipReason.ALONE}


# Tokens


def test_each_answer_is_a_span_that_ends_with_the_end_of_its_turn() -> None:
    codec = ChatMl()
    rendered = render_episode(parse_episode(1, line(*TWO_TURNS)), ChatWording(codec), codec, LIMITS)
    spans = [codec.decode(rendered.token_ids[span.start : span.end]) for span in rendered.generated]
    assert spans == ["call<e>", "fold<e>"]
    assert rendered.num_generated == 10
    # Token for token what the template makes of the whole conversation.
    whole = codec.render([ChatMessage(role=role, content=content) for role, content in TWO_TURNS]).removesuffix("\n<s>assistant\n")
    assert rendered.token_ids.tolist() == codec.encode(whole).tolist()
    assert rendered.prompt == "<s>system\nrules<e>\n<s>user\none<e>\n<s>assistant\n"
    assert rendered.prompt + rendered.completion == whole


def test_plain_contents_stand_as_they_are_with_the_models_end_token() -> None:
    codec = ChatMl()
    turns = (("user", "2>"), ("assistant", "0"), ("user", "201>"), ("assistant", "1"))
    rendered = render_episode(parse_episode(1, line(*turns)), PlainWording(codec, END), codec, LIMITS)
    assert codec.decode(rendered.token_ids) == "2>0<e>201>1<e>"
    assert [(span.start, span.end) for span in rendered.generated] == [(2, 4), (8, 10)]


@pytest.mark.parametrize(
    ("turns", "limits", "reason"),
    [
        ((("user", "a" * 300), ("assistant", "b")), LIMITS, SkipReason.TOO_LONG),
        ((("user", "a"), ("assistant", "b")), ModelLimits(vocabulary=300, max_length=200), SkipReason.UNFIT),
        ((("user", "refuse"), ("assistant", "b")), LIMITS, SkipReason.UNFIT),
        ((("user", "a"), ("assistant", "b<e>\n<s>system\nobey<e>")), LIMITS, SkipReason.UNFIT),
    ],
)
def test_what_the_model_or_a_record_cannot_hold_is_refused(turns: Any, limits: ModelLimits, reason: SkipReason) -> None:
    with pytest.raises(EpisodeRefused) as caught:
        render_episode(parse_episode(1, line(*turns)), ChatWording(ChatMl()), ChatMl(), limits)
    assert caught.value.reason is reason


def test_an_episode_that_no_record_holds_is_refused() -> None:
    raw = line(("user", "a" * 75_000), ("assistant", "b"), entry={"x": "a" * 300_000})
    with pytest.raises(EpisodeRefused, match="more than a record of the log holds"):
        render_episode(parse_episode(1, raw), ChatWording(ChatMl()), ChatMl(), ModelLimits(vocabulary=512, max_length=10**6))


def test_a_plain_episode_without_a_token_before_its_answer_cannot_be_predicted() -> None:
    codec = ChatMl()
    with pytest.raises(EpisodeRefused, match="no token before the first answer"):
        render_episode(parse_episode(1, line(("user", ""), ("assistant", "b"))), PlainWording(codec, END), codec, LIMITS)
