"""Which dialect a cluster speaks, found out by asking it before the first request."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from echo_rollout.engines.chat_text import ChatText
from echo_rollout.engines.engine import AnswerUnusable
from echo_rollout.engines.logprob_traits import TOP, LogprobTraits, look_at_logprobs
from echo_rollout.engines.openai_client import ServerClient, ServerRefused
from echo_rollout.engines.parallax_answers import ROUTE, ChatDialect, ChatRequest, chat_body, read_chat
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobDistribution, Sampling

_PROBE = Sampling(max_new_tokens=2)
# Tries for each dialect: an answer may be broken off, and tokens drawn after an unusual prompt may have no text, or another one's.
_TRIES, _TRIES_OF_TEXT = 3, 10


async def find_dialect(
    client: ServerClient, model: str, text: ChatText, *, wanted: str, vocabulary: int
) -> tuple[ChatDialect, LogprobTraits]:
    """The first dialect (or `wanted`) whose answers are complete, and what its log-probabilities are.

    Raises UserError if none does, EngineError if the cluster does not answer.
    """
    complaints = []
    prompt, content = text.sample(vocabulary)
    asked = ChatRequest(prompt=prompt, content=content, sampling=_PROBE, model=model, version=None)
    for dialect in [ChatDialect(wanted)] if wanted else list(ChatDialect):
        if complaint := await _complaint(client, dialect, asked, text):
            complaints.append(f"{dialect.value}: {complaint}")
            continue
        if dialect is ChatDialect.OPENAI:
            return dialect, await look_at_logprobs(partial(_likeliest, client, asked), url=client.url)
        # Parallax's own are a softmax over the whole vocabulary, after temperature.
        return dialect, LogprobTraits(usable=dialect is ChatDialect.LEGACY, distribution=LogprobDistribution.FULL)
    raise UserError(
        f"The cluster at {client.url} answers in no dialect that can be trained on. {' '.join(complaints)}",
        hint="See docs/engines.md on Parallax.",
    )


async def _complaint(client: ServerClient, dialect: ChatDialect, asked: ChatRequest, text: ChatText) -> str:
    """Why the cluster's answers in `dialect` cannot be used; empty if they can."""
    complaint = ""
    for _ in range(_TRIES_OF_TEXT if dialect is ChatDialect.TEXT else _TRIES):
        try:
            read_chat(dialect, asked, await client.post(ROUTE, chat_body(dialect, asked)), text)
        except AnswerUnusable as exc:
            complaint = exc.message
        except ServerRefused as exc:
            return exc.message
        else:
            return ""
    return complaint


async def _likeliest(client: ServerClient, asked: ChatRequest, *, temperature: float = 1.0, top_k: int = 0) -> dict[str, float]:
    """Log-probabilities of the likeliest first tokens, by what the cluster calls them."""
    sampling = replace(asked.sampling, max_new_tokens=1, temperature=temperature, top_k=top_k)
    body = chat_body(ChatDialect.OPENAI, replace(asked, sampling=sampling)) | {"top_logprobs": TOP}
    try:
        answer = await client.post(ROUTE, body)
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {str(each["token"]): float(each["logprob"]) for each in top if math.isfinite(each["logprob"])}
    except (ServerRefused, KeyError, IndexError, TypeError, ValueError):
        return {}
