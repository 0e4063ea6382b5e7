"""Answers between <answer> and </answer>: asks for them, finds them, and checks the form."""

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


class Form(StrEnum):
    """As `Style`, or brief symbols for a model that knows no language."""

    CHAT = "chat"
    TEXT = "text"
    BRIEF = "brief"


def asked(question: str, entry: Mapping[str, Any], style: Style, instruction: str = INSTRUCTION) -> Prompt:
    """`question` with the instruction below it."""
    text = f"{question}\n\n{instruction}"
    if style is Style.CHAT:
        return Prompt(messages=(ChatMessage(role="user", content=text),), entry=entry)
    return Prompt(text=text + "\n", entry=entry)


def tagged(text: str) -> str | None:
    """The text in the last pair of tags; None without one. Tags within tags: the innermost pair counts. Time is linear in the text."""
    closing = text.rfind(CLOSING)
    opening = text.rfind(OPENING, 0, closing) if closing >= 0 else -1
    return text[opening + len(OPENING) : text.index(CLOSING, opening)] if opening >= 0 else None


def final_answer(completion: str) -> str:
    """The text in the last pair of tags, or after the last opening tag, or all of it; without white space around it."""
    _, tag, rest = completion.rpartition(OPENING)
    return rest.partition(CLOSING)[0].strip() if tag else completion.strip()


@reward(name="answer-format")
def answer_format(sample: ScoredSample) -> float:
    """1 if the completion has one pair of tags, at its end and not empty; else 0."""
    text = sample.completion.strip()
    kept = text.count(OPENING) == text.count(CLOSING) == 1 and text.endswith(CLOSING)
    return float(kept and bool(final_answer(text)))
