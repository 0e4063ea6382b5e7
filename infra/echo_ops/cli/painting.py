"""Tokens on a screen: each piece of text in the colour of its log-probability, its advantage or its version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.text import Text

from echo_ops.cli.harmless import harmless
from echo_replay.history import Told
from echo_schemas.errors import UserError
from echo_schemas.records import Trajectory

Pieces = Callable[[list[int]], list[str]]
"""The text of each token, which together are the text of all."""

# A byte-level tokenizer needs at most so many tokens for one character, so a piece is told by what came just before it.
_CONTEXT = 8
_PROBABLE = ((0.9, "green"), (0.5, "default"), (0.1, "yellow"), (0.01, "red"), (0.0, "bold white on red"))
_GOOD, _BAD = "green", "red"
_VERSIONS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_GIVEN = "dim"


class Colour(StrEnum):
    """What a token's colour says."""

    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    VERSION = "version"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens [start, end) that the policy generated, or that it was given."""

    start: int
    end: int
    is_generated: bool


def tokenizer_of(base: str) -> Pieces | None:
    """Pieces by the tokenizer of a base model; None where it is not on this machine: the text is shown without it."""
    try:
        from echo_tasks.base_models import is_made, resolve_base
        from echo_tasks.prompts import PromptCodec

        if not is_made(base):
            return None
        codec = PromptCodec(Path(resolve_base(base)))
    except (ModuleNotFoundError, UserError):
        return None

    def pieces(tokens: list[int]) -> list[str]:
        found = []
        for at in range(len(tokens)):
            begin = max(0, at - _CONTEXT)
            before, after = codec.decode(tokens[begin:at]), codec.decode(tokens[begin : at + 1])
            found.append(after[len(before) :] if after.startswith(before) else after[len(before) - 1 :])
        return found

    return pieces


def passages_of(trajectory: Trajectory) -> Iterator[Passage]:
    """What was given and what was generated, in order; each span of the policy for itself."""
    position = 0
    for span in trajectory.generated:
        if span.start > position:
            yield Passage(position, span.start, is_generated=False)
        yield Passage(span.start, span.end, is_generated=True)
        position = span.end
    if position < len(trajectory.tokens):
        yield Passage(position, len(trajectory.tokens), is_generated=False)


def paint(told: Told, trajectory: Trajectory, passage: Passage, pieces: Pieces | None, colour: Colour) -> Text:
    """One passage. Without a tokenizer the ids of the tokens stand for their text."""
    tokens = trajectory.tokens[passage.start : passage.end].tolist()
    texts = pieces(tokens) if pieces is not None else [f"{token} " for token in tokens]
    styles = styles_of(told, trajectory, colour) if passage.is_generated else [_GIVEN] * len(trajectory.tokens)
    painted = Text()
    for text, style in zip(texts, styles[passage.start : passage.end], strict=True):
        painted.append(harmless(text, keep_lines=True), style)
    return painted


def styles_of(told: Told, trajectory: Trajectory, colour: Colour) -> list[str]:
    """A style for each token of the episode; of those that were not generated it means nothing."""
    styles = ["default"] * len(trajectory.tokens)
    if colour is Colour.LOGPROB:
        for at, value in zip(generated_places(trajectory), trajectory.logprob_values.tolist(), strict=True):
            styles[at] = style_of_logprob(value)
    elif colour is Colour.ADVANTAGE and told.entry.advantage is not None:
        style = _GOOD if told.entry.advantage > 0 else _BAD if told.entry.advantage < 0 else "default"
        styles = [style] * len(styles)
    elif colour is Colour.VERSION:
        for span in trajectory.version_spans:
            styles[span.start : span.end] = [_VERSIONS[span.version % len(_VERSIONS)]] * (span.end - span.start)
    return styles


def style_of_logprob(value: float) -> str:
    """By probability: above 0.9 green, above 0.5 plain, above 0.1 yellow, above 0.01 red, below it on red."""
    probability = math.exp(min(0.0, value))
    return next(style for least, style in _PROBABLE if probability >= least)


def generated_places(trajectory: Trajectory) -> list[int]:
    """Positions of the generated tokens, in the order of `logprobs`."""
    return [place for span in trajectory.generated for place in range(span.start, span.end)]


LEGENDS = {
    Colour.LOGPROB: Text.assemble("probability  ", *((f" ≥ {least:g} ", style) for least, style in _PROBABLE)),
    Colour.ADVANTAGE: Text.assemble("advantage  ", (" above 0 ", _GOOD), (" below 0 ", _BAD)),
    Colour.VERSION: Text("each version has a colour; versions stand above each sample"),
    Colour.NONE: Text(),
}
