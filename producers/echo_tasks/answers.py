"""Answers between <answer> and </answer>: how they are asked for, where they are found, and whether the form was kept."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from echo_schemas.records import ChatMessage
from echo_tasks.rewards import ScoredSample, reward
from echo_tasks.task import Prompt

OPENING, CLOSING = "<answer>", "</answer>"
INSTRUCTION = f"Think first. Then write the final answer, and nothing else, between {OPENING} and {CLOSING}."


class Style(StrEnum):
    """The form of a prompt: a message for the model's chat template, or text for its tokenizer as it is."""

    CHAT = "chat"
    TEXT = "text"


def asked(question: str, entry: Mapping[str, Any], style: Style, instruction: str = INSTRUCTION) -> Prompt:
    """`question` and below it how to answer."""
    text = f"{question}\n\n{instruction}"
    if style is Style.CHAT:
        return Prompt(messages=(ChatMessage(role="user", content=text),), entry=entry)
    return Prompt(text=text + "\n", entry=entry)


def final_answer(completion: str) -> str:
    """What stands in the last pair of tags, or behind the last opening one, or all of it; without white space around it."""
    _, tag, rest = completion.rpartition(OPENING)
    return rest.partition(CLOSING)[0].strip() if tag else completion.strip()


@reward(name="answer-format")
def answer_format(sample: ScoredSample) -> float:
    """1 if the completion ends with the one pair of tags in it and something stands between them; else 0."""
    text = sample.completion.strip()
    kept = text.count(OPENING) == text.count(CLOSING) == 1 and text.endswith(CLOSING)
    return float(kept and bool(final_answer(text)))
