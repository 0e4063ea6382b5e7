"""The rollout plane's text codec: the one of `echo_tasks.prompts`, which the learner shares when it asks for itself."""

from echo_tasks.prompts import ChatCodec, PromptCodec, TextCodec, TokenIds, continued, vocabulary_size

__all__ = ["ChatCodec", "PromptCodec", "TextCodec", "TokenIds", "continued", "vocabulary_size"]
