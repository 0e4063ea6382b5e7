"""A file of logged episodes: one JSON object a line. Reads it, refuses wrong lines, and puts episodes into groups.

    {"messages": [{"role": "system", "content": "…"}, {"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …],
     "rewards": [-20, 130], "group": "hand 17", "entry": {…}}

`rewards` holds one number for each assistant message; `return` is one number for all of them. `group` is the same for episodes that began
alike; those without one are taken together in the order of the file. `entry` is what reward functions see as the task's own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from echo_schemas.errors import EchoError, UserError
from echo_schemas.records import ChatMessage

# A record holds at most 900 KB: prompt and answer once as text and once as tokens.
_MAX_LINE_BYTES = 400_000
_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"


class SkipReason(StrEnum):
    """Why an episode is left out."""

    NOT_JSON = "not_json"
    NOT_MESSAGES = "not_messages"
    ROLE_ORDER = "role_order"
    NO_ANSWER = "no_answer"
    BAD_REWARD = "bad_reward"
    BAD_FIELD = "bad_field"
    TOO_LONG = "too_long"
    UNFIT = "unfit"
    ALONE = "alone"


class EpisodeRefused(EchoError):
    """An episode that cannot be trained, and why."""

    def __init__(self, reason: SkipReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A line of the file that is left out."""

    line: int
    reason: SkipReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A whole conversation. `messages`: at most one system message, at the start, then user and assistant in turns, an answer last.
    `turn_rewards`: one for each answer, or a single one for the episode.
    """

    line: int
    messages: tuple[ChatMessage, ...]
    turn_rewards: tuple[float, ...]
    group: str | None = None
    entry: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFile:
    """A file's episodes and skipped lines. `sha256`: of its content."""

    name: str
    sha256: str
    episodes: tuple[Episode, ...]
    skipped: tuple[Skipped, ...]


def read_episodes(path: Path) -> EpisodeFile:
    """Every line of the file: an episode, or why it is none. Raises UserError if the file cannot be read."""
    digest = hashlib.sha256()
    episodes: list[Episode] = []
    skipped: list[Skipped] = []
    try:
        with path.open("rb") as file:
            for number, raw in _lines(file, digest):
                try:
                    episodes.append(parse_episode(number, raw))
                except EpisodeRefused as exc:
                    skipped.append(Skipped(line=number, reason=exc.reason, detail=exc.message))
    except OSError as exc:
        raise UserError(f"The episodes {path} cannot be read: {exc.strerror or exc}.", hint="Name a JSON Lines file.") from exc
    return EpisodeFile(name=path.name, sha256=digest.hexdigest(), episodes=tuple(episodes), skipped=tuple(skipped))


def parse_episode(line: int, raw: bytes) -> Episode:
    """One line. Raises EpisodeRefused."""
    if len(raw) > _MAX_LINE_BYTES:
        raise EpisodeRefused(SkipReason.TOO_LONG, f"The line has more than {_MAX_LINE_BYTES:,} bytes.")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise EpisodeRefused(SkipReason.NOT_JSON, f"The line is no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise EpisodeRefused(SkipReason.NOT_JSON, "The line is no JSON object.")
    messages = _in_turns(_messages(found.get("messages")))
    group, entry = found.get("group"), found.get("entry", {})
    if isinstance(group, bool) or not isinstance(group, str | int | None):
        raise EpisodeRefused(SkipReason.BAD_FIELD, f"`group` is {type(group).__name__}; it takes a string or a whole number.")
    if not isinstance(entry, dict):
        raise EpisodeRefused(SkipReason.BAD_FIELD, f"`entry` is {type(entry).__name__}; it takes a JSON object.")
    return Episode(
        line=line,
        messages=messages,
        turn_rewards=_rewards(found, sum(message.role == _ASSISTANT for message in messages)),
        group=None if group is None else str(group),
        entry=json.dumps(entry, ensure_ascii=False),
    )


def into_groups(episodes: Iterable[Episode], size: int) -> tuple[list[tuple[Episode, ...]], list[Skipped]]:
    """Groups in the order in which they begin in the file: episodes of one `group`, and each `size` episodes without one.

    An episode that is alone is left out, because its reward cannot be compared.
    """
    named: dict[str, list[Episode]] = {}
    unnamed: list[Episode] = []
    for episode in episodes:
        if episode.group is None:
            unnamed.append(episode)
        else:
            named.setdefault(episode.group, []).append(episode)
    found = [*named.values(), *(unnamed[start : start + size] for start in range(0, len(unnamed), size))]
    groups = sorted((tuple(group) for group in found if len(group) > 1), key=lambda group: group[0].line)
    alone = [
        Skipped(
            line=group[0].line, reason=SkipReason.ALONE, detail="It is the only episode of its group: nothing tells whether it is good."
        )
        for group in found
        if len(group) == 1
    ]
    return groups, alone


def _lines(file: BinaryIO, digest: Any) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank; of an overlong one only its beginning."""
    number, is_new = 0, True
    while piece := file.readline(_MAX_LINE_BYTES + 2):
        digest.update(piece)
        if is_new:
            number += 1
            content = piece.strip()
            if content:
                yield number, content if piece.endswith(b"\n") or len(piece) < _MAX_LINE_BYTES + 2 else piece
        is_new = piece.endswith(b"\n")


def _messages(given: Any) -> list[ChatMessage]:
    if not isinstance(given, list) or not given:
        raise EpisodeRefused(SkipReason.NOT_MESSAGES, "`messages` is no list with messages in it.")
    messages = []
    for each in given:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise EpisodeRefused(SkipReason.NOT_MESSAGES, "A message has no `role` and `content` as text.")
        messages.append(ChatMessage(role=role, content=content))
    return messages


def _in_turns(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join users' messages that follow one another, a line apart, and drop those after the last answer.

    Masks come from spans and not from the parity of messages, so extra messages such as `Reward: 3` do no harm.
    """
    turns: list[ChatMessage] = []
    for message in messages:
        before = turns[-1].role if turns else None
        if message.role == _USER and before == _USER:
            turns[-1] = ChatMessage(role=_USER, content=f"{turns[-1].content}\n{message.content}")
            continue
        allowed = {_SYSTEM: before is None, _USER: before in {None, _SYSTEM, _ASSISTANT}, _ASSISTANT: before == _USER}
        if not allowed.get(message.role, False):
            place = f"after {before!r}" if before else "first"
            raise EpisodeRefused(SkipReason.ROLE_ORDER, f"A message of the role {message.role!r} stands {place}.")
        if message.role == _ASSISTANT and not message.content:
            raise EpisodeRefused(SkipReason.NO_ANSWER, "An assistant's message is empty.")
        turns.append(message)
    while turns and turns[-1].role != _ASSISTANT:
        turns.pop()
    if not turns:
        raise EpisodeRefused(SkipReason.NO_ANSWER, "There is no assistant's message: nothing to train.")
    return tuple(turns)


def _rewards(found: dict[str, Any], num_answers: int) -> tuple[float, ...]:
    if ("rewards" in found) == ("return" in found):
        raise EpisodeRefused(SkipReason.BAD_REWARD, "It takes `rewards`, one for each answer, or `return`, and not both.")
    given = found["rewards"] if "rewards" in found else [found["return"]]
    if not isinstance(given, list) or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in given):
        raise EpisodeRefused(SkipReason.BAD_REWARD, "A reward is no number.")
    if "rewards" in found and len(given) != num_answers:
        raise EpisodeRefused(SkipReason.BAD_REWARD, f"There are {len(given)} rewards for {num_answers} answers.")
    try:
        rewards = tuple(map(float, given))
    except OverflowError:
        rewards = (math.inf,)
    if not all(map(math.isfinite, rewards)):
        raise EpisodeRefused(SkipReason.BAD_REWARD, "A reward is not finite.")
    return rewards
