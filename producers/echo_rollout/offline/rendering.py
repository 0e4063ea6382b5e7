"""An episode as tokens: the chat template's, with every answer a span of its own, laid out as a worker would have written it.

    <prompt> answer ⟨end⟩ <what the template writes up to the next answer> answer ⟨end⟩
             └────span───┘                                                  └────span───┘

The mark that ends a turn belongs to the answer: the model has to write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_rollout.offline.episodes import Episode, EpisodeRefused, SkipReason
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import ChatMessage, Span
from echo_tasks.prompts import ChatCodec, TextCodec, TokenIds

_ASSISTANT = "assistant"
# Below the 900 KB of a record by what its other fields take.
_MAX_RECORD_BYTES = 880_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenderedEpisode:
    """`token_ids` int32 [T], the prompt's first; `generated`: the answers in them; `prompt` and `completion` as text."""

    episode: Episode
    token_ids: TokenIds
    generated: tuple[Span, ...]
    prompt: str
    completion: str

    @property
    def num_generated(self) -> int:
        """Tokens of answers."""
        return sum(span.end - span.start for span in self.generated)

    @property
    def num_bytes(self) -> int:
        """About the size of its record: tokens, at most as many log-probabilities, and the texts."""
        return 8 * len(self.token_ids) + sum(len(text.encode()) for text in (self.prompt, self.completion, self.episode.entry))


class ChatWording:
    """Words messages by the base model's chat template."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec

    def opening(self, messages: Sequence[ChatMessage]) -> TokenIds:
        """The tokens up to the first answer. Raises InvalidRecord."""
        return self._codec.encode(self._codec.render(messages))

    def reply(self, content: str) -> TokenIds:
        """The tokens from the end of an answer, over the user's `content`, to the next answer; the first token ends the answer."""
        return self._codec.encode(self._codec.render_reply(content))


class PlainWording:
    """As `ChatWording`, but the messages' texts alone, for a model without a template; `end` is its end token."""

    def __init__(self, codec: TextCodec, end: int) -> None:
        self._codec = codec
        self._end = np.array([end], np.int32)

    def opening(self, messages: Sequence[ChatMessage]) -> TokenIds:
        return self._codec.encode("".join(message.content for message in messages))

    def reply(self, content: str) -> TokenIds:
        return np.concatenate([self._end, self._codec.encode(content)]) if content else self._end


Wording = ChatWording | PlainWording


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The model's limits: token ids are below `vocabulary`, and there are at most `max_length`."""

    vocabulary: int
    max_length: int


def render_episode(episode: Episode, wording: Wording, codec: TextCodec, limits: ModelLimits) -> RenderedEpisode:
    """The episode's tokens. Raises EpisodeRefused for one that the model or a record cannot hold, or that its template refuses."""
    first = next(index for index, message in enumerate(episode.messages) if message.role == _ASSISTANT)
    try:
        parts, spans = _parts(episode.messages, first, wording, codec)
    except InvalidRecord as exc:
        raise EpisodeRefused(SkipReason.UNFIT, exc.message) from exc
    token_ids = np.concatenate(parts)
    if not len(parts[0]):
        raise EpisodeRefused(SkipReason.UNFIT, "There is no token before the first answer to predict it from.")
    if len(token_ids) > limits.max_length:
        raise EpisodeRefused(SkipReason.TOO_LONG, f"It has {len(token_ids)} tokens, above [policy] max_length = {limits.max_length}.")
    if int(token_ids.max()) >= limits.vocabulary:
        raise EpisodeRefused(SkipReason.UNFIT, f"It has the token {int(token_ids.max())}, outside the vocabulary of {limits.vocabulary}.")
    rendered = RenderedEpisode(
        episode=episode,
        token_ids=token_ids,
        generated=spans,
        prompt=codec.decode(parts[0]),
        completion=codec.decode(np.concatenate(parts[1:])),
    )
    if rendered.num_bytes > _MAX_RECORD_BYTES:
        raise EpisodeRefused(SkipReason.TOO_LONG, f"It takes {rendered.num_bytes:,} bytes, more than a record of the log holds.")
    return rendered


def _parts(messages: Sequence[ChatMessage], first: int, wording: Wording, codec: TextCodec) -> tuple[list[TokenIds], tuple[Span, ...]]:
    """The tokens in parts, the prompt first, and the answers' spans. Raises InvalidRecord, EpisodeRefused."""
    parts, spans = [wording.opening(messages[:first])], []
    length = len(parts[0])
    for index in range(first, len(messages), 2):
        # After the last answer only the first token is used, the end of a turn.
        reply = wording.reply(messages[index + 1].content if index + 1 < len(messages) else "")
        answer = np.concatenate([codec.encode(messages[index].content), reply[:1]])
        if reply[0] in answer[:-1]:
            raise EpisodeRefused(SkipReason.UNFIT, "An answer contains the model's own mark for the end of a turn.")
        spans.append(Span(start=length, end=length + len(answer)))
        parts.append(answer)
        if index + 1 < len(messages):
            parts.append(reply[1:])
        length += len(answer) + (len(reply) - 1 if index + 1 < len(messages) else 0)
    return parts, tuple(spans)
