"""Text to token ids and back by the base model's own tokenizer file, and facts from its config.json. Does not load torch."""

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
from echo_tasks.task import Prompt

TokenIds = npt.NDArray[np.int32]
# Stands for an answer in the template, to find where an answer ends. Letters alone: templates cut thoughts out and trim white space.
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
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))

    def num_unknown(self, text: str) -> int:
        """How many tokens of `text` are the tokenizer's unknown token; 0 for tokenizers without one."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        if not unknown:
            return 0
        return sum(token == self._tokenizer.token_to_id(unknown) for token in self.encode(text).tolist())

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """See `ChatCodec`. Loads transformers the first time. Raises InvalidRecord also for a model without a template."""
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
        """See `ChatCodec`. Earlier turns are not rendered again, so their tokens stay as they are. Raises InvalidRecord for a template that
        refuses a second turn or leaves earlier answers out.
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
    """The conversation with `text` said by the user at its end, joined with a user's message there: templates refuse two in a row."""
    *before, last = messages
    if last.role != "user":
        return [*messages, ChatMessage(role="user", content=text)]
    return [*before, replace(last, content=f"{last.content}\n\n{text}")]


def check_template(base: Path, prompt: Prompt) -> None:
    """Raise UserError for a prompt in chat form where the model in `base` has no chat template, as models that only continue text."""
    if prompt.messages and not has_template(base):
        raise UserError(
            f"The task asks in chat form, and {base} has no chat template: no prompt can be made of its messages.",
            hint="Take the model's chat version (often -Instruct), or set tokenizer.chat_template and save the tokenizer in this folder.",
        )


def has_template(base: Path) -> bool:
    """Whether the model in `base` has a chat template."""
    if any((base / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")):
        return True
    try:
        config = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def vocabulary_size(base: Path) -> int:
    """Token ids of the model are below this. Raises UserError if its config.json does not say."""
    size = _number(base, "vocab_size")
    if size is None:
        raise UserError(f"{base / 'config.json'} does not say `vocab_size`.", hint="Use a folder that `save_pretrained` wrote.")
    return int(size)


def attention_of(base: Path) -> str:
    """The attention of transformers that is right for the model in `base`. `sdpa` silently leaves out a cap on the scores, so a model with
    one (Gemma 2) takes `eager`. Raises UserError if its config.json cannot be read."""
    return "sdpa" if _number(base, "attn_logit_softcapping") is None else "eager"


def check_positions(base: Path, max_length: int) -> None:
    """Raise UserError if sequences of `max_length` tokens are longer than the model has positions. A model without a number has enough."""
    positions = _number(base, "max_position_embeddings")
    if positions is not None and max_length > positions:
        raise UserError(
            f"[policy] max_length is {max_length}, and the model in {base} has {positions:.0f} positions.",
            hint=f"Set it to {positions:.0f} at most.",
        )


def end_tokens(base: Path) -> tuple[int, ...]:
    """The tokens that end an answer, by config.json, the usual one first. Raises UserError if it names none."""
    found = _said(base, "eos_token_id")
    ends = tuple(found) if isinstance(found, list) else (found,)
    if not ends or not all(isinstance(end, int) for end in ends):
        raise UserError(f"{base / 'config.json'} does not say `eos_token_id`.", hint="Add it there.")
    return ends


def pad_token(base: Path) -> int | None:
    """The padding token, if config.json names one. Raises UserError if it cannot be read."""
    found = _said(base, "pad_token_id")
    return found if isinstance(found, int) else None


def _number(base: Path, name: str) -> float | None:
    found = _said(base, name)
    return found if isinstance(found, int | float) else None


def _said(base: Path, name: str) -> Any:
    """A value in the model's config.json, which models of several parts have below `text_config`. Raises UserError."""
    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        found = config.get(name)
        return config.get("text_config", {}).get(name) if found is None else found
    except (OSError, ValueError, AttributeError) as exc:
        raise UserError(f"{base / 'config.json'} cannot be read: {exc}.", hint="Use a folder that `save_pretrained` wrote.") from exc
