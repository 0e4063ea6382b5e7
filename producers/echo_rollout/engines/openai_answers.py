"""What a server is asked and what it answers, in its two dialects. Pure: JSON in, JSON and arrays out.

    generate      POST /inference/v1/generate   token ids in, token ids out; vLLM with --enable-scale-out
    completions   POST /v1/completions          with a prompt of token ids, `return_token_ids` and log-probabilities

An answer is used only if all of it fits the request: every choice once, the model that was named, a log-probability for exactly the
tokens that are returned, each finite and at most 0. Nothing is repaired: a guessed number would be trained like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from echo_rollout.engines.engine import AnswerUnusable, EngineError, Generation, SnapshotRef
from echo_schemas.records import FinishReason, LogprobDistribution, LogprobSource, Sampling, VersionSpan

AnswerT = TypeVar("AnswerT")

# The OpenAI interface's own limit, which vLLM's completions route checks.
_MOST_STOPS = 4
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_ID_PREFIX = "token_id:"
# After so many unusable answers in a row the engine gives up.
_MOST_UNUSABLE = 32
# Servers write it where a log-probability is −inf or no number.
_NO_LOGPROB = -9999.0
# A sampled token's log-probability may come out above 0 by as much, in numbers of low precision.
_ROUNDING = 1e-3


class Dialect(StrEnum):
    """Which route generates."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """A request. `model`: the name at the server; `label`: the server's name for the weights in force, None if it was given none;
    `logprobs`: whether the server gives them."""

    prompt: Sequence[int]
    num_choices: int
    sampling: Sampling
    model: str
    label: str | None
    logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredChoice:
    """One checked choice: token ids, one log-probability each (none if the server gives none), and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class UnusableAnswers:
    """Counts unusable answers in a row."""

    def __init__(self) -> None:
        self._count = 0

    def counted(self, read: Callable[[], AnswerT]) -> AnswerT:
        """What `read` returns. Raises AnswerUnusable, and EngineError when there were too many of them without a good one between."""
        try:
            found = read()
        except AnswerUnusable as exc:
            self._count += 1
            if self._count >= _MOST_UNUSABLE:
                raise EngineError(f"{_MOST_UNUSABLE} answers in a row could not be used. {exc.message}") from exc
            raise
        self._count = 0
        return found


def check_stops(dialect: Dialect, sampling: Sampling) -> None:
    """Raise EngineError if the server would refuse so many stop texts: OpenAI's route takes four."""
    if dialect is Dialect.COMPLETIONS and len(sampling.stop) > _MOST_STOPS:
        raise EngineError(
            f"This server's completions route takes at most {_MOST_STOPS} stop texts, and {len(sampling.stop)} are asked for. "
            "Shorten [rollout] stop, or use a server with the route of token ids."
        )


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Every field, because a server fills in the model's own where one is missing."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


def request_body(dialect: Dialect, asked: SentRequest) -> dict[str, Any]:
    """The request's JSON."""
    drawn = {"n": asked.num_choices, **sampling_fields(asked.sampling)}
    if asked.logprobs:
        # The sampled token's own, and no other.
        drawn["logprobs"] = 0
    if dialect is Dialect.GENERATE:
        drawn["detokenize"] = bool(asked.sampling.stop)
        return {"model": asked.model, "token_ids": list(asked.prompt), "sampling_params": drawn}
    told = {"return_tokens_as_token_ids": True} if asked.logprobs else {}
    return {"model": asked.model, "prompt": list(asked.prompt), "return_token_ids": True, **told, **drawn}


def read_choices(dialect: Dialect, asked: SentRequest, answer: Any) -> list[AnsweredChoice]:
    """The checked choices, in order of index. Raises AnswerUnusable."""
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise AnswerUnusable("The server's answer has no choices.")
    if answer.get("model") != asked.model:
        raise AnswerUnusable(f"The server was asked for {asked.model!r} and answers for {answer.get('model')!r}.")
    choices = {choice.get("index"): choice for choice in answer["choices"] if isinstance(choice, dict)}
    if len(answer["choices"]) != asked.num_choices or set(choices) != set(range(asked.num_choices)):
        raise AnswerUnusable(f"The server returned {len(answer['choices'])} choices, and {asked.num_choices} were asked for.")
    return [_choice(dialect, asked, choices[index]) for index in range(asked.num_choices)]


def generations_of(
    choices: Sequence[AnsweredChoice], texts: Sequence[str], sampling: Sampling, ref: SnapshotRef, distribution: LogprobDistribution
) -> list[Generation]:
    """As generations under `ref`. `texts`: of all tokens; cut here at the first stop text. `distribution`: of the log-probabilities, which
    are zeros where the server gives none."""
    return [
        Generation(
            token_ids=np.array(choice.tokens, np.int32),
            logprobs=np.array(choice.logprobs, np.float32) if choice.logprobs else np.zeros(len(choice.tokens), np.float32),
            version_spans=(VersionSpan(start=0, end=len(choice.tokens), version=ref.version),) if choice.tokens else (),
            weights_sha256=ref.sha256,
            finish_reason=choice.finish_reason,
            text=_cut(text, sampling.stop),
            logprob_source=LogprobSource.SAMPLER if choice.logprobs or not choice.tokens else LogprobSource.RECOMPUTED,
            logprob_distribution=distribution,
        )
        for choice, text in zip(choices, texts, strict=True)
    ]


def _choice(dialect: Dialect, asked: SentRequest, choice: dict[str, Any]) -> AnsweredChoice:
    tokens = check_tokens(choice.get("token_ids"), asked.sampling)
    check_prompt_tokens(choice.get("prompt_token_ids"), asked.prompt)
    _check_label(asked, choice)
    finish_reason = finish_reason_of(choice)
    logprobs = _logprobs(dialect, tokens, choice.get("logprobs")) if asked.logprobs else []
    return AnsweredChoice(tokens=tokens, logprobs=logprobs, finish_reason=finish_reason)


def check_tokens(tokens: Any, sampling: Sampling) -> list[int]:
    """`tokens`, known to be token ids and no more than were asked for. Raises AnswerUnusable."""
    if not isinstance(tokens, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise AnswerUnusable("The server's answer has no token ids.")
    if len(tokens) > sampling.max_new_tokens:
        raise AnswerUnusable(f"The server returned {len(tokens)} tokens, and {sampling.max_new_tokens} were asked for at most.")
    return tokens


def check_prompt_tokens(given: Any, prompt: Sequence[int]) -> None:
    """Raise AnswerUnusable if the server read another prompt, by its own answer."""
    if given is not None and given != list(prompt):
        raise AnswerUnusable("The server answered another prompt than the one it was asked.")


def finish_reason_of(choice: dict[str, Any]) -> FinishReason:
    """Why it ended. Raises AnswerUnusable for one that was broken off."""
    found = _FINISHED.get(choice.get("finish_reason") or "")
    if found is None:
        raise AnswerUnusable(f"The server stopped in the middle of an answer ({choice.get('finish_reason')}).")
    return found


def _check_label(asked: SentRequest, choice: dict[str, Any]) -> None:
    """Raise AnswerUnusable if the server names other weights for a token than those in force when it was asked."""
    spans = choice.get("weight_versions")
    if asked.label is None or not isinstance(spans, list):
        return
    found = {span.get("version") for span in spans if isinstance(span, dict)}
    if found - {asked.label}:
        raise AnswerUnusable(f"The server generated under {', '.join(sorted(map(str, found)))}, and {asked.label} was asked for.")


def _logprobs(dialect: Dialect, tokens: list[int], given: Any) -> list[float]:
    """One for each token, and for that very token. Raises AnswerUnusable."""
    scored: list[int | None]
    values: list[Any]
    if dialect is Dialect.GENERATE:
        content = given.get("content") if isinstance(given, dict) else None
        entries = [entry for entry in content or [] if isinstance(entry, dict)]
        scored, values = [entry.get("token_id") for entry in entries], [entry.get("logprob") for entry in entries]
    else:
        names = given.get("tokens") if isinstance(given, dict) else None
        scored = [token_of(name) for name in names or []]
        values = list((given.get("token_logprobs") if isinstance(given, dict) else None) or [])
    return check_logprobs(tokens, scored, values)


def check_logprobs(tokens: Sequence[int], scored: Sequence[int | None], values: Sequence[Any]) -> list[float]:
    """`values`, known to be one log-probability for each of `tokens`, in their order. Raises AnswerUnusable."""
    if len(values) != len(tokens):
        raise AnswerUnusable(f"The server returned {len(values)} log-probabilities for {len(tokens)} tokens.")
    if list(scored) != list(tokens):
        raise AnswerUnusable("The server scored other tokens than those that it returned.")
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= _NO_LOGPROB or value > _ROUNDING:
            raise AnswerUnusable(f"The server returned {value!r} as a log-probability.")
    return [min(0.0, float(value)) for value in values]


def token_of(name: Any) -> int | None:
    """`token_id:17` → 17; None for anything else."""
    number = str(name).removeprefix(_ID_PREFIX)
    return int(number) if str(name).startswith(_ID_PREFIX) and number.isdecimal() else None


def _cut(text: str, stops: Sequence[str]) -> str:
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text
