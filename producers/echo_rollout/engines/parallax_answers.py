"""What a Parallax cluster is asked and what it answers, in the three dialects of its one route. Pure: JSON in, JSON and tokens out.

    openai-vllm       a vLLM server behind the scheduler: token ids, and log-probabilities after temperature
    parallax-legacy   Parallax up to May 2026: `return_probs` brings token ids, a probability for each, and `weight_version`
    parallax-head     Parallax since (vllm-rs before its executors): text alone; the learner computes log-probabilities

One request asks for one answer: Parallax gives no more, whatever `n` is. As in `openai_answers`, an answer is used only if all of it fits
the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from echo_rollout.engines.chat_text import ChatText
from echo_rollout.engines.engine import AnswerUnusable
from echo_rollout.engines.openai_answers import (
    AnsweredChoice,
    check_logprobs,
    check_prompt_tokens,
    check_tokens,
    finish_reason_of,
    sampling_fields,
    token_of,
)
from echo_schemas.records import FinishReason, Sampling

ROUTE = "/v1/chat/completions"


class ChatDialect(StrEnum):
    """What the cluster's answers hold beside text; the richest first."""

    OPENAI = "openai-vllm"
    LEGACY = "parallax-legacy"
    TEXT = "parallax-head"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for one answer. `content`: `prompt` as a message; `version`: the one that the answer has to name, if it names any."""

    prompt: Sequence[int]
    content: str
    sampling: Sampling
    model: str
    version: int | None


def chat_body(dialect: ChatDialect, asked: ChatRequest) -> dict[str, Any]:
    """The request's JSON."""
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": [{"role": "user", "content": asked.content}],
        "stream": False,
        **sampling_fields(asked.sampling),
        # −1 means all tokens in every dialect.
        "top_k": asked.sampling.top_k or -1,
    }
    if dialect is ChatDialect.OPENAI:
        body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if dialect is ChatDialect.LEGACY:
        body["return_probs"] = True
    return body


def read_chat(dialect: ChatDialect, asked: ChatRequest, answer: Any, text: ChatText) -> AnsweredChoice:
    """The one checked choice; without log-probabilities in the dialect `parallax-head`. Raises AnswerUnusable."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise AnswerUnusable("The cluster's answer does not have one choice.")
    (choice,) = choices
    finish_reason = finish_reason_of(choice)
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    read = usage.get("prompt_tokens")
    if read is not None and read != len(asked.prompt):
        raise AnswerUnusable(f"The cluster read a prompt of {read} tokens, and {len(asked.prompt)} were sent: its chat template differs.")
    if dialect is ChatDialect.TEXT:
        tokens = _tokens_of_text(asked, choice, usage.get("completion_tokens"), finish_reason, text)
        return AnsweredChoice(tokens=tokens, logprobs=[], finish_reason=finish_reason)
    tokens = check_tokens(choice.get("token_ids"), asked.sampling)
    if dialect is ChatDialect.OPENAI:
        check_prompt_tokens(answer.get("prompt_token_ids"), asked.prompt)
        given = choice.get("logprobs")
        entries = [entry for entry in (given.get("content") if isinstance(given, dict) else None) or [] if isinstance(entry, dict)]
        logprobs = check_logprobs(tokens, [token_of(entry.get("token")) for entry in entries], [entry.get("logprob") for entry in entries])
    else:
        _check_version(asked.version, answer.get("weight_version"))
        logprobs = check_logprobs(tokens, tokens, _log_of(choice.get("probs")))
    return AnsweredChoice(tokens=tokens, logprobs=logprobs, finish_reason=finish_reason)


def _tokens_of_text(asked: ChatRequest, choice: dict[str, Any], num_drawn: Any, finish_reason: FinishReason, text: ChatText) -> list[int]:
    """The tokens that were drawn, as far as the text and their number show. Raises AnswerUnusable."""
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content or "", str):
        raise AnswerUnusable("The cluster's answer has no text.")
    if message.get("reasoning_content") or message.get("tool_calls"):
        raise AnswerUnusable("The cluster takes answers apart (reasoning_content, tool_calls): switch its parsers off.")
    tokens = text.tokens_of(content or "")
    if finish_reason is FinishReason.STOP:
        reason = choice.get("stop_reason")
        # The cluster names the end token only if it is not the usual one.
        tokens.append(reason if isinstance(reason, int) and reason in text.end_tokens else text.end_tokens[0])
    if num_drawn != len(tokens):
        raise AnswerUnusable(f"The answer's text has {len(tokens)} tokens, and the cluster says that it drew {num_drawn}.")
    return check_tokens(tokens, asked.sampling)


def _check_version(wanted: int | None, found: Any) -> None:
    if wanted is not None and found != wanted:
        raise AnswerUnusable(f"The cluster generated under version {found}, and {wanted} was asked for.")


def _log_of(probs: Any) -> list[Any]:
    """Natural logarithms of `[{text: probability}, …]`; −∞ for a value that is no probability, which `check_logprobs` refuses."""
    found: list[Any] = []
    for entry in probs if isinstance(probs, list) else []:
        value = next(iter(entry.values()), None) if isinstance(entry, dict) else None
        found.append(math.log(value) if isinstance(value, float | int) and value > 0 else -math.inf)
    return found
