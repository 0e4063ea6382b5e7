"""Prompts and answers for a server that takes messages and returns text: from token ids to one message, and from text to token ids.

A message is used only if the chat template and the tokenizer make exactly the prompt's tokens of it, and a text only if its tokens decode
to exactly that text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echo_rollout.engines.engine import AnswerUnusable
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.records import ChatMessage
from echo_tasks.prompts import PromptCodec, end_tokens, pad_token

# Letters alone: templates trim white space.
_CONTENT = "EchoSwarmContentStandsHere"


class ChatText:
    """The base model's chat template and tokenizer. `end_tokens`: those that end an answer, the usual one first."""

    def __init__(self, base: Path) -> None:
        """Loads transformers. Raises UserError for a model without a chat template."""
        self._codec = PromptCodec(base)
        self.end_tokens = end_tokens(base)
        # Not for the probe: after padding alone, whose embedding is zero, all tokens are equally likely.
        self._empty_tokens = {*self.end_tokens, pad_token(base)}
        try:
            self._before, found, self._after = self._render(_CONTENT).partition(_CONTENT)
        except InvalidRecord as exc:
            raise UserError(
                f"The engine needs a chat template: {exc.message}", hint="Save the one that the cluster uses into [policy] base."
            ) from exc
        if not found:
            raise UserError(f"The chat template in {base} leaves a user's message out.", hint="Save the one that the cluster uses there.")

    def sample(self, vocabulary: int) -> tuple[list[int], str]:
        """A short prompt and the message that makes it. Raises UserError if no single token can be sent as a message."""
        for token in sorted(set(range(vocabulary)) - self._empty_tokens):
            content = self._codec.decode([token])
            prompt = self._tokens_of_message(content)
            if content and len(prompt) == len(self._tokens_of_message("")) + 1 and self._codec.decode(prompt) == self._render(content):
                return prompt, content
        raise UserError("No token of the model can be sent as a chat message.", hint="Use an engine that takes token ids.")

    def content_of(self, prompt: Sequence[int]) -> str:
        """The user's message of which the template makes `prompt`. It includes earlier turns, with their special tokens as text.

        Raises AnswerUnusable if there is none for this prompt.
        """
        text = self._codec.decode(prompt)
        content = text[len(self._before) : len(text) - len(self._after)]
        if not (text.startswith(self._before) and text.endswith(self._after)) or self._tokens_of_message(content) != list(prompt):
            raise AnswerUnusable(
                "The prompt cannot be sent as a chat message: the chat template makes other tokens of its text. Use a task whose prompts "
                "are messages, or an engine that takes token ids."
            )
        return content

    def tokens_of(self, text: str) -> list[int]:
        """The token ids of an answer's text. Raises AnswerUnusable if they do not decode to it."""
        tokens: list[int] = self._codec.encode(text).tolist()
        if self._codec.decode(tokens) != text:
            raise AnswerUnusable("The answer's tokens do not decode to its text, so it cannot be trained.")
        return tokens

    def _tokens_of_message(self, content: str) -> list[int]:
        try:
            tokens: list[int] = self._codec.encode(self._render(content)).tolist()
        except InvalidRecord:
            return []
        return tokens

    def _render(self, content: str) -> str:
        return self._codec.render([ChatMessage(role="user", content=content)])
