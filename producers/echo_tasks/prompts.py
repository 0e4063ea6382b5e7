"""Text to token ids and back, with the base model's own tokenizer file; light enough for whoever asks, who need not load torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from echo_schemas.errors import InvalidReason, InvalidRecord, UserError
from echo_schemas.records import ChatMessage

TokenIds = npt.NDArray[np.int32]
# Stands for an answer in the template, to find where it ends. Letters alone: templates cut thoughts out and trim white space.
_ANSWER = "EchoSwarmAnswerStandsHere"


class TextCodec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> TokenIds:
        """int32 [T], no special tokens added."""

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        """The text, special tokens included."""


class ChatCodec(TextCodec, Protocol):
    """Text and chat messages to token ids."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The chat template over `messages`, open for the answer. Raises InvalidRecord."""

    def render_reply(self, content: str) -> str:
        """What the chat template writes from the end of an answer, through a user's message of `content`, to where the next answer
        begins. Raises InvalidRecord.
        """


class PromptCodec:
    """The tokenizer of one base model. Thread-safe: the library's encoder is."""

    def __init__(self, base: Path) -> None:
        """`base` is a model folder. Raises UserError if it has no tokenizer.json."""
        from tokenizers import Tokenizer

        file = base / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"{base} has no tokenizer.json.", hint="Save the model's fast tokenizer there: tokenizer.save_pretrained(folder)."
            )
        self._base = base
        self._tokenizer = Tokenizer.from_file(str(file))
        self._chat: Any = None

    def encode(self, text: str) -> TokenIds:
        """Token ids of `text` as it is, int32 [T]; no special tokens are added."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        """The text of `token_ids`, special tokens included: what the policy saw."""
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))

    def num_unknown(self, text: str) -> int:
        """How many tokens of `text` stand for what the tokenizer has no token for; 0 for those that have one for everything."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        if not unknown:
            return 0
        return sum(token == self._tokenizer.token_to_id(unknown) for token in self.encode(text).tolist())

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The base model's chat template over `messages`, open for the answer. Loads transformers the first time.

        Raises InvalidRecord for messages that the template refuses, and for a model without a template.
        """
        if self._chat is None:
            from transformers import AutoTokenizer

            self._chat = AutoTokenizer.from_pretrained(str(self._base))
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as exc:  # a template is a program of the model's author and may raise anything
            raise InvalidRecord(
                InvalidReason.HANDLER_REFUSED, f"The chat template of {self._base.name} refused the messages: {exc}"
            ) from exc

    def render_reply(self, content: str) -> str:
        """What stands between two answers when the user says `content`: the marker that ends a turn comes first. What was said
        before is not written again, so its tokens stay as they are.

        Raises InvalidRecord for a template that refuses a second turn or leaves earlier answers out.
        """
        turns = (("user", "?"), ("assistant", _ANSWER), ("user", content))
        text = self.render([ChatMessage(role=role, content=said) for role, said in turns])
        _, found, reply = text.partition(_ANSWER)
        if not found:
            raise InvalidRecord(
                InvalidReason.HANDLER_REFUSED, f"The chat template of {self._base.name} leaves earlier answers out: it has no second turn."
            )
        return reply


def continued(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """The conversation with `text` said by the user at its end. In one message with what stands there: templates refuse two in a row."""
    *before, last = messages
    if last.role != "user":
        return [*messages, ChatMessage(role="user", content=text)]
    return [*before, replace(last, content=f"{last.content}\n\n{text}")]


def vocabulary_size(base: Path) -> int:
    """Token ids of the model are below this. Raises UserError if its config.json does not say."""
    size = _said(base, "vocab_size")
    if size is None:
        raise UserError(f"{base / 'config.json'} does not say `vocab_size`.", hint="Use a folder that `save_pretrained` wrote.")
    return int(size)


def attention_of(base: Path) -> str:
    """Which of transformers' attentions computes what the model in `base` means. `sdpa` leaves out a cap on the scores without a word, so a
    model that has one (Gemma 2) takes `eager`. Raises UserError if its config.json cannot be read."""
    return "sdpa" if _said(base, "attn_logit_softcapping") is None else "eager"


def check_positions(base: Path, max_length: int) -> None:
    """Raise UserError if sequences of `max_length` tokens are longer than the model has positions. Models that do not say have enough."""
    positions = _said(base, "max_position_embeddings")
    if positions is not None and max_length > positions:
        raise UserError(
            f"[policy] max_length is {max_length}, and the model in {base} has {positions:.0f} positions.",
            hint=f"Set it to {positions:.0f} at most.",
        )


def _said(base: Path, name: str) -> float | None:
    """A number in the model's config.json, where models of several parts have it below `text_config`. Raises UserError."""
    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        found = config.get(name) or config.get("text_config", {}).get(name)
    except (OSError, ValueError, AttributeError) as exc:
        raise UserError(f"{base / 'config.json'} cannot be read: {exc}.", hint="Use a folder that `save_pretrained` wrote.") from exc
    return found if isinstance(found, int | float) else None
